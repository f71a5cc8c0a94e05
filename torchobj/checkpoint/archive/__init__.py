"""One `.pt` file, a zip archive (`zip_archive`): `save` and `load`.

`save` plans the archive without the bytes of its tensors (`plan`), and sends these from their own memory. `load` reads
the directory of the archive (`records`) and an outline of its pickle (`pickling`), then the tensors into their memory,
and then unpickles: everything, selected entries, or into existing tensors (`entries`). Memory of devices is read and
written through a few blocks (`device_memory`). `failed_save` checks what other writers of such files wrote.
"""
