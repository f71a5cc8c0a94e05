"""Checkpoints as objects: `save` and `load`, files over objects (`files`), and the class of s3torchconnector (`s3`).

A `.pt` file is a zip archive (`archive`). Saving plans one without the tensors' bytes (`plan`) and sends these from
where they are. Loading reads its directory (`records`, over `ranges` of an object) and what its pickle holds
(`outline`), then the tensors into their memory, and then unpickles (`pickling`): all of it, some (`selection`), or into
tensors that exist (`filling`). What lies on a device goes through a little memory (`staging`).
"""
