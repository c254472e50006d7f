"""python train.py objective=idp backbone=transformer modality=lowdim preset=cpu; --help lists all choices."""

from diffusion_policy.scripts.train import main

if __name__ == "__main__":
    main()
