"""Files of safetensors, and folders of them as Hugging Face lays them out (`names`).

`header` parses and writes the start of a file. It and the index of a folder are untrusted: `json_text` parses them in
bounded memory. `save` plans a file, which is sent like one of `torch.save`. `file` reads tensors of files into memory,
and `weights` finds those of a URL: a file, or a folder as one state. `load` returns them, or fills tensors of the
caller, and `stream` yields them as they arrive. `folder` writes a folder.
"""
