"""Packages: diffusion_policy, of namespace packages, idp_workspace, and the configs as diffusion_policy.config."""

import pathlib

from setuptools import find_namespace_packages, setup

# A checkout keeps config/ at the top; an installed package carries the same files as diffusion_policy.config.
configs = {
    ".".join(("diffusion_policy", *folder.parts)): folder.as_posix()
    for folder in (pathlib.Path("config"), *(p for p in pathlib.Path("config").rglob("*") if p.is_dir()))
}

setup(
    packages=[
        *find_namespace_packages(
            include=["diffusion_policy", "diffusion_policy.*", "idp_workspace", "idp_workspace.*"]
        ),
        *configs,
    ],
    package_dir=configs,
    package_data={
        **{name: ["*.yaml"] for name in configs},
        "diffusion_policy.env.pick_peach": ["*.xml"],
        "diffusion_policy.env.robomimic": ["starts/*.npz"],
        "idp_workspace.suite": ["*.j2"],
    },
)
