"""Train a policy. `train.py` of a checkout and the installed command `idp-train` both start here.

python train.py --config-name=train_idp_transformer_lowdim preset=cpu
python train.py --config-name=train_idp_transformer_lowdim training.seed=0,1,2 --multirun
"""

from __future__ import annotations

import os
import sys

import hydra
from omegaconf import DictConfig, OmegaConf

from diffusion_policy.common.config_util import config_dir, get_class, register_resolvers
from diffusion_policy.common.errors import UserError
from diffusion_policy.workspace.base_workspace import BaseWorkspace

register_resolvers()


@hydra.main(version_base=None, config_path=str(config_dir()))
def main(cfg: DictConfig) -> None:
    if "_target_" not in cfg:
        names = sorted(path.stem for path in config_dir().glob("train_*.yaml"))
        sys.exit("choose a configuration with --config-name=NAME; there are:\n  " + "\n  ".join(names))
    OmegaConf.resolve(cfg)  # now, so that every ${now:...} is the same moment
    try:
        get_class(cfg._target_, BaseWorkspace)(cfg).run()
    except UserError as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        sys.exit(f"error: {error}\n(HYDRA_FULL_ERROR=1 shows where)")


if __name__ == "__main__":
    main()
