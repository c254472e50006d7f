"""python train.py objective=idp backbone=transformer modality=lowdim preset=cpu; --help lists all choices."""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - before the imports, which an older Python cannot read
    sys.stderr.write("error: Python 3.11 or newer is needed, this is " + sys.version.split()[0] + "; see README.md\n")
    sys.exit(2)

try:
    from diffusion_policy.scripts.train import main
except KeyboardInterrupt:
    sys.exit(130)

if __name__ == "__main__":
    main()
