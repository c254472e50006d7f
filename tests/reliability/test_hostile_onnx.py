"""ONNX files made to harm, or damaged: each is refused in one clear line, before anything of it runs."""

import json

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from diffusion_policy import load_policy
from diffusion_policy.common.errors import CheckpointError
from diffusion_policy.export.signature import Field, Signature
from diffusion_policy.storage import checkpoint_io, onnx_io

CFG = {"policy": {}, "task": {"env_runner": None}, "training": {"seed": 0}}
SIGNATURE = Signature(
    (Field("obs", (2, 5), "state", (0.0,) * 5, (1.0,) * 5),),
    (Field("action", (2, 5), "action"), Field("action_pred", (2, 5), "action")),
    "Example", 2, 2, 1, 1,
)  # fmt: skip


def model(nodes=None, initializers=(), inputs=("obs",)):
    """A graph that returns its observation as the action."""
    nodes = nodes or [helper.make_node("Identity", ["obs"], [name]) for name in ("action", "action_pred")]
    shape = ["batch", 2, 5]
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in (*inputs, "action", "action_pred")
    ]
    graph = helper.make_graph(nodes, "g", values[: len(inputs)], values[len(inputs) :], list(initializers))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def write(path, graph, change=None, **further):
    about = {"signature": SIGNATURE.described(), "cfg": CFG, **further}
    if change is not None:
        change(about)
    path.write_bytes(onnx_io.pack(graph, about))
    return path


def refused(path, message):
    for read in (load_policy, lambda p: checkpoint_io.load(p, sections=("policy",))):
        try:
            read(path)
        except CheckpointError as error:
            assert message in str(error) and "\n" not in str(error)
            return
    pytest.fail("it was opened")


def test_a_good_file_is_read(tmp_path):
    assert load_policy(write(tmp_path / "good.onnx", model())).horizon == 2


def external(location):
    tensor = numpy_helper.from_array(np.zeros((2, 5), np.float32), "w")
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    return tensor


def outputs(*first):
    return [
        *first,
        helper.make_node("Identity", ["x"], ["action"]),
        helper.make_node("Identity", ["x"], ["action_pred"]),
    ]


@pytest.mark.parametrize("location", ["/etc/passwd", "../secret", "inside.bin"])
def test_numbers_in_other_files(tmp_path, location):
    (tmp_path / "inside.bin").write_bytes(bytes(40))
    add = outputs(helper.make_node("Add", ["obs", "w"], ["x"]))
    refused(write(tmp_path / "m.onnx", model(add, [external(location)])), "numbers in other files")
    constant = outputs(
        helper.make_node("Constant", [], ["w"], value=external(location)), helper.make_node("Add", ["obs", "w"], ["x"])
    )
    refused(write(tmp_path / "m.onnx", model(constant)), "numbers in other files")


def test_operators_of_libraries_and_functions(tmp_path):
    custom = model(outputs(helper.make_node("Evil", ["obs"], ["x"], domain="my.lib")))
    refused(write(tmp_path / "m.onnx", custom), "my.lib")
    custom = model()
    custom.opset_import.add(domain="my.lib", version=1)
    refused(write(tmp_path / "m.onnx", custom), "not part of ONNX")
    function = model()
    function.functions.add(name="f", domain="")
    refused(write(tmp_path / "m.onnx", function), "functions")


def test_control_flow(tmp_path):
    kinds = {"i": TensorProto.INT64, "c": TensorProto.BOOL, "d": TensorProto.BOOL}
    i, c, d = (helper.make_tensor_value_info(name, kind, []) for name, kind in kinds.items())
    body = helper.make_graph([helper.make_node("Identity", ["c"], ["d"])], "b", [i, c], [d])
    loop = helper.make_node("Loop", ["", ""], ["x"], body=body)
    refused(write(tmp_path / "m.onnx", model(outputs(loop))), "control flow")


def test_a_graph_that_asks_for_all_memory(tmp_path):
    size = numpy_helper.from_array(np.array([1 << 20, 1 << 20], np.int64), "size")
    nodes = outputs(
        helper.make_node("ConstantOfShape", ["size"], ["big"]),
        helper.make_node("ReduceSum", ["big"], ["sum"], keepdims=0),
        helper.make_node("Add", ["obs", "sum"], ["x"]),
    )
    refused(write(tmp_path / "m.onnx", model(nodes, [size])), "m.onnx")


def test_a_changed_byte_of_the_weights(tmp_path):
    weight = numpy_helper.from_array(np.full((2, 5), 7.5, np.float32), "w")
    path = write(tmp_path / "m.onnx", model(outputs(helper.make_node("Add", ["obs", "w"], ["x"])), [weight]))
    data = bytearray(path.read_bytes())
    data[data.index(np.float32(7.5).tobytes())] ^= 1
    path.write_bytes(data)
    refused(path, "damaged")


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda about: about.pop("signature"), "does not describe"),
        (lambda about: about.update(signature=7), "does not describe"),
        (lambda about: about["signature"].update(n_obs_steps=10**9), "does not describe"),
        (lambda about: about["signature"]["inputs"][0].update(kind="pickle"), "does not describe"),
        (lambda about: about["signature"]["inputs"][0].update(shape=[2, 6]), "other inputs"),
        (lambda about: about["signature"]["inputs"][0].update(name="state"), "other inputs"),
        (lambda about: about["signature"]["outputs"][0].update(shape=[3, 5]), "other shapes"),
        (lambda about: about.pop("cfg"), "cfg"),
        (lambda about: about.update(cfg={**CFG, "policy": {"_target_": "os.system"}}), "os.system"),
        (lambda about: about.update(cfg=[]), "cfg"),
    ],
)
def test_metadata_that_do_not_fit(tmp_path, change, message):
    refused(write(tmp_path / "m.onnx", model(), change), message)


def test_a_runner_of_another_package(tmp_path):
    cfg = {**CFG, "task": {"env_runner": {"_target_": "subprocess.Popen", "args": "true"}}}
    path = write(tmp_path / "m.onnx", model(), cfg=cfg)
    with pytest.raises(CheckpointError, match="subprocess"):
        checkpoint_io.load(path, sections=("policy", "task.env_runner"))


def test_files_of_others(tmp_path):
    path = tmp_path / "m.onnx"
    onnx.save(model(), path)
    refused(path, "not exported by this project")
    graph = model()
    graph.metadata_props.add(key=onnx_io.KEY, value=json.dumps([1]))
    onnx.save(graph, path)
    refused(path, "another structure")
    for content in (b"", b"not onnx", bytes(1000)):
        path.write_bytes(content)
        refused(path, "m.onnx")
