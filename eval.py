"""python eval.py --checkpoint data/outputs/.../checkpoints/latest.ckpt [--output_dir DIR] [--n_episodes N] ..."""

from diffusion_policy.scripts.eval import main

if __name__ == "__main__":
    main()
