"""Datasets whose samples are named by the folders of their keys: `image_folder` by class, and `groups` of objects.

Both are datasets of a `folder`, a prefix with its objects.
"""
