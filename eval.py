"""python eval.py --checkpoint data/outputs/.../checkpoints/latest.ckpt; --help lists all options."""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - before the imports, which an older Python cannot read
    sys.stderr.write("error: Python 3.11 or newer is needed, this is " + sys.version.split()[0] + "; see README.md\n")
    sys.exit(2)

try:
    from diffusion_policy.scripts.eval import main
except KeyboardInterrupt:
    sys.exit(130)

if __name__ == "__main__":
    main()
