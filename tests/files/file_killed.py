"""Run by `test_files_resume.py`: for each line of orders a child that downloads an object, to be killed."""

import torchobj
from tests.support.killing import serve


def save(orders):
    """Downloads the object."""
    torchobj.Store(orders["url"], config=orders["config"]).download_file("large", orders["path"])


if __name__ == "__main__":
    serve(save)
