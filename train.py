"""python train.py --config-name=train_idp_transformer_lowdim [preset=paper|cpu|debug] [any=override ...]"""

from diffusion_policy.scripts.train import main

if __name__ == "__main__":
    main()
