"""`python -m torchobj` is the command line `torchobj`."""

from torchobj.cli import main

if __name__ == "__main__":
    main()
