"""Messages of the policy server: what openpi's client writes and reads, and what is refused."""

import pickle
import struct

import numpy as np
import pytest

msgpack = pytest.importorskip("msgpack")  # before what imports it

from diffusion_policy.policy.interface import Entry, PolicyInterface
from diffusion_policy.serving.codec import MessageError, decode, encode
from diffusion_policy.serving.observation import ObservationReader

theirs = pytest.importorskip("openpi_client.msgpack_numpy")
ARRAYS = [np.arange(6).astype(dtype).reshape(2, 3) for dtype in ("<f4", ">f8", "<f2", "|u1", "<i8", "<u2", "|b1")]


@pytest.mark.parametrize("array", [*ARRAYS, np.zeros((0, 3)), np.array(2.5)], ids=lambda a: f"{a.dtype.str}{a.shape}")
def test_arrays_travel_both_ways(array):
    message = {"x": array, "n": np.float32(1.5), "nested": {"prompt": "push the T", "list": [1, 2.5, None]}}
    for data in (theirs.packb(message), encode(message)):
        for read in (decode, theirs.unpackb):
            back = read(data)
            assert back["x"].dtype == array.dtype and back["x"].shape == array.shape
            np.testing.assert_array_equal(back["x"], array)
            assert back["n"] == 1.5 and back["nested"] == message["nested"]


@pytest.mark.parametrize("value", [np.array([1j]), np.array([object()]), np.zeros(2, "V4"), np.array(["a"]), {1, 2}])
def test_other_kinds_are_not_sent(value):
    with pytest.raises(TypeError, match="cannot be sent"):
        encode({"x": value})


def array(data=b"\0" * 8, dtype="<f4", shape=(2,), **more):
    return {b"__ndarray__": True, b"data": data, b"dtype": dtype, b"shape": shape} | more


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was executed",))


def nested(depth):
    return b"\x91" * depth + b"\xc0"


@pytest.mark.parametrize(
    "message",
    [
        array(dtype="O"),
        array(dtype="|O8"),
        array(data=pickle.dumps(Bomb()), dtype="|O"),
        array(dtype="<c8"),
        array(dtype="V8"),
        array(dtype="<f4,<f4"),
        array(dtype="<U2"),
        array(dtype="<M8[s]"),
        array(dtype="b2"),
        array(dtype=["<f4"]),
        array(dtype=None),
        array(shape=(3,)),
        array(shape=(-1,)),
        array(shape=(2**40, 2**40)),
        array(shape=(2.0,)),
        array(shape=(True, 2)),
        array(shape=2),
        array(shape=[1] * 7 + [2, 1]),
        array(data="text"),
        array(data=None),
        {b"__npgeneric__": True, b"data": "x", b"dtype": "<f4"},
        {b"__npgeneric__": True, b"data": 1.0, b"dtype": "O"},
        [[]] * 300,
        msgpack.ExtType(1, b"x"),
        msgpack.Timestamp(1),
        {"x": list(range(9000))},
    ],
    ids=str,
)
def test_hostile_content_is_refused(message):
    with pytest.raises(MessageError):
        decode(msgpack.packb({"x": message}))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x81\xa1x",
        b"\x81\x01\x02",  # a key that is a number
        b"\xc0\xc0",
        pickle.dumps({"x": 1}),
        nested(100_000),
        b"\xdd\xff\xff\xff\xff",  # a list of four billion
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xffabc",
        b"\xa3\xff\xfe\xfd",
        struct.pack(">BI", 0xDD, 5_000_000) + b"\xc0" * 5_000_000,
    ],
    ids=lambda data: repr(data[:12]),
)
def test_bytes_that_are_no_message_are_refused(data):
    with pytest.raises(MessageError):
        decode(data)


# ---------------------------------------------------------------------- observations
READER = ObservationReader(PolicyInterface({"image": Entry((3, 8, 10), rgb=True), "pos": Entry((2,))}, 2, 4, 2))
IMAGE = np.random.default_rng(0).integers(0, 256, (3, 8, 10), dtype=np.uint8)
POS = np.array([1.0, 2.0])


@pytest.mark.parametrize(
    "image", [IMAGE, np.moveaxis(IMAGE, 0, -1), IMAGE / 255, (IMAGE / 255).astype(np.float32)], ids=str
)
def test_images_come_as_cameras_and_as_policies_have_them(image):
    for lead in (False, True):
        message = {"image": np.stack([image, image]) if lead else image, "pos": np.stack([POS, POS]) if lead else POS}
        entries, whole = READER.read({**message, "prompt": "ignored"})
        assert whole is lead and entries["image"].dtype == np.uint8 and entries["pos"].dtype == np.float32
        np.testing.assert_array_equal(entries["image"][-1] if lead else entries["image"], IMAGE)


def test_numbers_may_be_lists():
    assert READER.read({"image": IMAGE, "pos": [1, 2.5]})[0]["pos"].tolist() == [1, 2.5]


@pytest.mark.parametrize(
    "message, text",
    [
        ([1], "map of arrays"),
        ({"image": IMAGE}, "lacks pos"),
        ({"image": IMAGE, "pos": np.zeros(3)}, "pos must have the shape"),
        ({"image": IMAGE[:, :4], "pos": POS}, "image must have the shape"),
        ({"image": IMAGE, "pos": np.stack([POS, POS])}, "one step, or all"),
        ({"image": IMAGE, "pos": np.array([np.nan, 0])}, "finite"),
        ({"image": IMAGE, "pos": np.array([1e300, 0])}, "finite"),
        ({"image": IMAGE, "pos": np.array([True, False])}, "numbers"),
        ({"image": IMAGE.astype(np.int32), "pos": POS}, "uint8"),
        ({"image": IMAGE.astype(np.float32), "pos": POS}, "divide by 255"),
        ({"image": IMAGE, "pos": "up"}, "must be an array"),
        ({"image": IMAGE, "pos": [1, "2"]}, "list of values that are not numbers"),
        ({"image": IMAGE, "pos": None}, "must be an array"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_observations_that_do_not_fit_are_refused(message, text):
    with pytest.raises(MessageError, match=text):
        READER.read(message)
