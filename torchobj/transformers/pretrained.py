"""Models and tokenizers of transformers in a folder of a bucket: `from_pretrained` and `save_pretrained`.

Weights go directly between the bucket and the memory of tensors; configurations and the files of tokenizers pass
through a temporary folder. transformers itself decides what the state means for a model, and what a save contains.
"""

import contextlib
import copy
import json
import re
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

# Its modules are imported when their names are used: without models that takes a second, with them five.
import transformers

from torchobj import files
from torchobj.checkpoint.archive.load import load
from torchobj.checkpoint.archive.save import save
from torchobj.checkpoint.safetensors import folder as safetensors
from torchobj.checkpoint.safetensors import names
from torchobj.config import StoreConfig, resolve
from torchobj.exceptions import CheckpointError, ConfigError, UnsupportedError
from torchobj.store.store import Store
from torchobj.urls import Url, parse_url

__all__ = ["from_pretrained", "save_pretrained"]

#: Files of weights in the order in which transformers looks for them.
_SAFETENSORS = (names.WHOLE, names.INDEX)
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")

_CONFIG, _GENERATION_CONFIG = "config.json", "generation_config.json"

#: Files that a tokenizer or a processor may read: no weights, and no code.
_SMALL = re.compile(
    r"(additional_chat_templates/|\w*tokenizer/)?[\w.+-]{1,200}"
    r"\.(json|txt|model|jinja|spm|codes|bpe|vocab|tiktoken|tokenizer)(?<!\.index\.json)",
    re.ASCII,
)

#: Maximum size of all files that are copied into the temporary folder; the files of a tokenizer have up to 50 MB.
_SMALL_BYTES = 256 << 20

#: Arguments of transformers that have no meaning for a URL, and what to do instead.
_NOT_LOADED = {
    "trust_remote_code": "code in a bucket is never run; download the folder and review it, then load it from there",
    "subfolder": "append it to the URL",
    "variant": "the names of weights must be those without a variant",
    "gguf_file": "a GGUF file must be local",
    "state_dict": "the weights are those of the URL; from_pretrained of the class itself accepts others",
    "revision": "a folder has no revisions; name the folder of the one that you want",
    "share": "ranks of a machine that load at the same time read once, as by torchobj.load(share='auto')",
}
_NOT_SAVED = {
    "push_to_hub": "call push_to_hub of the model",
    "distributed_checkpoint": "torchobj.checkpoint.dcp.StorageWriter writes distributed checkpoints",
    "variant": "the names of weights must be those without a variant",
    "save_function": "weights are written as safetensors",
}

#: Held while `transformers.modeling_utils` has another function for files of weights.
_redirecting = threading.RLock()


def from_pretrained(cls: type, url: str, *, store_config: StoreConfig | None = None, **kwargs: Any) -> Any:
    """Loads a model, tokenizer, processor or configuration of transformers from a folder of a bucket.

    Weights are read in parallel ranges into the memory of their tensors, and no file of weights is written. They are
    passed to `cls.from_pretrained(None, config=..., state_dict=...)`, which converts, quantises and ties them, and
    creates buffers, as for a local folder. A folder has `model.safetensors`, `model.safetensors.index.json` or, if
    neither, `pytorch_model.bin` or its index; pickles are loaded with `weights_only=True` only. Code of the folder is
    never run, and `auto_map`, which names such code, is dropped from the configuration of a model.

    Args:
        cls: A class of transformers: of models such as `LlamaForCausalLM` or `AutoModelForCausalLM`, or of tokenizers,
            processors and configurations such as `AutoTokenizer`.
        url: The folder, such as `s3://bucket/model/`; a slash is appended if it has none.
        store_config: Settings of the store. `config` is the argument of transformers: the configuration of the model.
        kwargs: Arguments of `cls.from_pretrained`, such as `dtype`, `device_map` and `quantization_config`. Weights
            for other devices pass through the memory of the CPU, and those that `device_map` assigns to `"disk"` are
            written by transformers to `offload_folder`.

    Returns:
        What `cls.from_pretrained` returns. `name_or_path` of a model or tokenizer is the URL.

    Raises:
        ConfigError: An argument is invalid or not supported for URLs, such as `trust_remote_code=True`; or the weights
            are pickles, and `weights_only=False`.
        CheckpointError: The folder has no configuration or no weights, a file is damaged or contradicts another one, or
            transformers cannot use the files without running their code.
        UnsupportedError: The folder has adapters of PEFT, or weights of torchao, which need a local folder.
        StoreError: The store refused a request, or failed after all retries.

    Example:
        >>> import torchobj, transformers
        >>> config = transformers.GPT2Config(vocab_size=8, n_positions=8, n_embd=4, n_layer=1, n_head=1)
        >>> save_pretrained(transformers.GPT2LMHeadModel(config), "memory://example/gpt2/")
        >>> model = from_pretrained(transformers.AutoModelForCausalLM, "memory://example/gpt2/")
        >>> type(model).__name__, model.num_parameters()
        ('GPT2LMHeadModel', 316)
    """
    kind: Any = cls
    if not isinstance(cls, type) or not callable(getattr(cls, "from_pretrained", None)):
        raise ConfigError(f"cls={cls!r}: must be a class of transformers that has from_pretrained")
    _check_arguments("from_pretrained", kwargs, _NOT_LOADED)
    kwargs.pop("trust_remote_code", None)
    found = _Folder(url, store_config)
    with tempfile.TemporaryDirectory(prefix="torchobj-") as local:
        folder = Path(local)
        if not _is_model(cls):
            found.copy(found.small_files(), folder)
            with _reading(found.url, folder):
                loaded = kind.from_pretrained(local, trust_remote_code=False, **kwargs)
            if hasattr(loaded, "name_or_path"):
                loaded.name_or_path = found.url
            return loaded
        found.copy([name for name in (_CONFIG, _GENERATION_CONFIG) if name in found.sizes], folder)
        with _reading(found.url, folder):
            config, rest = _configuration(kind, found, folder, kwargs)
    config = copy.deepcopy(config)
    vars(config).pop("auto_map", None)
    if not issubclass(cls, transformers.PreTrainedModel):
        kind, config = _of_auto_class(kind, config, found.url)
    state = found.state(config, rest)
    loaded = kind.from_pretrained(None, config=config, state_dict=state, **rest)
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    model.name_or_path = model.config.name_or_path = found.url
    return loaded


def _folder_url(url: str) -> Url:
    """Parses the URL of a folder; the key ends with a slash, or is empty."""
    parsed = parse_url(url)
    return parsed._replace(key=f"{parsed.key.removesuffix('/')}/" if parsed.key else "")


def _check_arguments(operation: str, kwargs: Mapping[str, Any], refused: Mapping[str, str]) -> None:
    for name, remedy in refused.items():
        if kwargs.get(name):
            shown = repr(kwargs[name]) if isinstance(kwargs[name], bool | str) else "..."
            raise ConfigError(f"{operation}: {name}={shown}: not supported for URLs: {remedy}")


def _is_model(cls: type) -> bool:
    # Classes such as AutoModel map configurations to classes of models.
    return issubclass(cls, transformers.PreTrainedModel) or hasattr(cls, "_model_mapping")


@contextlib.contextmanager
def _reading(url: str, folder: Path) -> Iterator[None]:
    """Names the URL in errors of transformers about the copies of files."""
    try:
        yield
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        names_code = any(b'"auto_map"' in path.read_bytes() for path in folder.glob("*config.json"))
        hint = "; its auto_map names code, and code in a bucket is never run" if names_code else ""
        text = f"{type(error).__name__}: {error}".replace(str(folder), url)
        raise CheckpointError(f"from_pretrained {url}: {text}{hint}") from error


def _configuration(
    cls: Any, found: "_Folder", folder: Path, kwargs: Mapping[str, Any]
) -> tuple["transformers.PretrainedConfig", dict[str, Any]]:
    """Returns the configuration of a model, and the arguments that remain for the model."""
    is_auto = not issubclass(cls, transformers.PreTrainedModel)
    rest = dict(kwargs)
    config = rest.pop("config", None)
    if config is None and _CONFIG not in found.sizes:
        raise CheckpointError(f"from_pretrained {found.url}: has no {_CONFIG}; save_pretrained writes such folders")
    if config is None:
        # As AutoModel reads it: arguments that are attributes of a configuration change it.
        kept = {name: rest.pop(name) for name in ("dtype", "torch_dtype", "quantization_config") if name in rest}
        reader = transformers.AutoConfig if is_auto else cls.config_class
        config, rest = reader.from_pretrained(folder, return_unused_kwargs=True, trust_remote_code=False, **rest)
        rest |= kept
    elif not isinstance(config, transformers.PretrainedConfig):
        raise ConfigError(
            f"config=: a {type(config).__name__}: must be a configuration of transformers; store_config= is that of "
            "the store"
        )
    if rest.get("generation_config") is None and _GENERATION_CONFIG in found.sizes:
        generation: Any = transformers.GenerationConfig.from_pretrained(folder)
        # As the classes of models and AutoModel do: those change it by all arguments, these by the remaining ones.
        generation.update(**(rest if is_auto else kwargs))
        rest["generation_config"] = generation
    return config, rest


def _of_auto_class(auto: Any, config: Any, url: str) -> tuple[Any, Any]:
    """Returns the class of the model that a class such as AutoModel selects, and its configuration.

    `from_pretrained` of such classes takes no None for the folder.
    """
    if type(config) not in auto._model_mapping:
        raise CheckpointError(
            f"from_pretrained {url}: {auto.__name__} has no model for {type(config).__name__}; code in a bucket, such "
            "as that of auto_map, is never run"
        )
    auto_factory: Any = transformers.models.auto.auto_factory
    cls = auto_factory._get_model_class(config, auto._model_mapping)
    if cls.config_class is getattr(config, "sub_configs", {}).get("text_config"):
        quantization = getattr(config, "quantization_config", None)
        config = config.get_text_config()
        if quantization is not None:
            config.quantization_config = quantization
    return cls, config


class _Folder:
    """The objects in a folder of a bucket.

    Args:
        url: The folder, with or without a slash at the end.
        config: Settings of the store.

    Raises:
        ConfigError: This is not a URL.
        StoreError: The folder cannot be listed.
    """

    def __init__(self, url: str, config: StoreConfig | None) -> None:
        parsed = _folder_url(url)
        self.url, self._prefix, self._config = str(parsed), parsed.key, config
        self._store = Store(parsed.base, config=resolve(self.url, config))
        #: By name, without those in folders.
        self.sizes: dict[str, int] = {}
        self._inner: list[str] = []
        for page in self._store.list(self._prefix, "/").pages():
            self._add(page.objects)
            self._inner += [prefix.removeprefix(self._prefix) for prefix in page.prefixes]

    def _add(self, listed: Iterable[Any]) -> None:
        self.sizes.update((info.key.removeprefix(self._prefix), info.size or 0) for info in listed)

    def small_files(self) -> list[str]:
        """Returns the names of files of tokenizers, processors and configurations; adds those in folders of them."""
        for inner in self._inner:
            if _SMALL.fullmatch(f"{inner}x.json"):
                self._add(self._store.list(self._prefix + inner))
        return [name for name in self.sizes if _SMALL.fullmatch(name)]

    def copy(self, wanted: list[str], folder: Path) -> None:
        """Copies files into a local folder.

        Raises:
            CheckpointError: They are too large.
        """
        total = sum(self.sizes[name] for name in wanted)
        if total > _SMALL_BYTES:
            largest = max(wanted, key=self.sizes.__getitem__)
            raise CheckpointError(
                f"from_pretrained {self.url}: the files without weights have {total:,} bytes, {largest} "
                f"{self.sizes[largest]:,}; the limit is {_SMALL_BYTES:,}"
            )
        for name, body in zip(wanted, self._store.get_many([self._prefix + name for name in wanted]), strict=True):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(body)

    def state(self, config: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Loads the weights.

        Args:
            config: The configuration of the model.
            kwargs: Arguments of `from_pretrained`.

        Raises:
            As `from_pretrained`.
        """
        if "adapter_config.json" in self.sizes:
            raise UnsupportedError(f"from_pretrained {self.url}: has adapters of PEFT, which need a local folder")
        given = kwargs.get("use_safetensors")
        candidates = (*(() if given is False else _SAFETENSORS), *(() if given else _PICKLED))
        if (named := getattr(config, "transformers_weights", None)) is not None:
            candidates = (named,)
        first = next((name for name in candidates if name in self.sizes), None)
        if first is None:
            raise CheckpointError(f"from_pretrained {self.url}: has no weights: none of {', '.join(candidates)}")
        if first in _PICKLED and not kwargs.get("weights_only", True):
            raise ConfigError(f"from_pretrained {self.url}{first}: weights_only=False would run code of the pickle")
        if first not in _PICKLED and _quantization_method(config) == "torchao":
            raise UnsupportedError(f"from_pretrained {self.url}: weights of torchao need a local folder")
        extra = [name for name in getattr(type(config), "extra_files", ()) if name in self.sizes]
        state: dict[str, Any] = {}
        for name in [*(self._pickled_shards() if first == _PICKLED[1] else [first]), *extra]:
            loaded = load(self.url + name, "cpu", weights_only=True, config=self._config)
            if not isinstance(loaded, Mapping):
                raise CheckpointError(f"from_pretrained {self.url}{name}: a {type(loaded).__name__}, not a state_dict")
            state.update(loaded)
        return state

    def _pickled_shards(self) -> list[str]:
        """Returns the names of the files in the index of pickles."""
        index = self.url + _PICKLED[1]
        if self.sizes[_PICKLED[1]] > _SMALL_BYTES:
            raise CheckpointError(f"{index}: the index has {self.sizes[_PICKLED[1]]:,} bytes, limit {_SMALL_BYTES:,}")
        try:
            shards = set(json.loads(bytes(self._store.get(self._prefix + _PICKLED[1])))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{index}: the index is damaged: {error!r}") from None
        if missing := [name for name in shards if name not in self.sizes]:
            raise CheckpointError(f"{index}: names {str(missing[0])[:100]!r}, which is not in this folder")
        return sorted(shards)


def _quantization_method(config: Any) -> Any:
    given = getattr(config, "quantization_config", None)
    return given.get("quant_method") if isinstance(given, dict) else getattr(given, "quant_method", None)


def save_pretrained(
    model: "transformers.PreTrainedModel",
    url: str,
    tokenizer: Any = None,
    *,
    store_config: StoreConfig | None = None,
    **kwargs: Any,
) -> None:
    """Saves a model of transformers, and its tokenizer or processor, to a folder of a bucket.

    The objects are the files of `model.save_pretrained(folder, **kwargs)` and `tokenizer.save_pretrained(folder)`, byte
    for byte. Files of weights are sent from the memory of the tensors as transformers is about to write them, so that
    none is on the local disk; tensors must not change until this returns. The other files pass through a temporary
    folder.

    Weights of safetensors that are in the folder are deleted first, and the index is written last: after an error, or a
    kill, the folder has none. Other files stay. Within a process, one save runs at a time.

    If each of several ranks calls this, the rank that transformers selects writes. The others may return before the
    index is written: let the ranks meet before they read it.

    Args:
        model: The model; of a wrapper, such as DistributedDataParallel, the module that it wraps.
        url: The folder, such as `s3://bucket/model/`; a slash is appended if it has none.
        tokenizer: Saved to the same folder, if it is not None.
        store_config: Settings of the store.
        kwargs: Arguments of `model.save_pretrained`, such as `max_shard_size` and `state_dict`.

    Raises:
        ConfigError: An argument is invalid or not supported for URLs, such as `push_to_hub=True`.
        CheckpointError: Tensors share memory in a way that transformers does not know, or their memory was freed.
        UnsupportedError: The model has adapters of PEFT; or this version of transformers writes weights by itself.
        StoreError: The store refused a request, or failed after all retries.
        TransferError: Files without weights could not be uploaded.

    Example:
        >>> import torchobj, transformers
        >>> config = transformers.GPT2Config(vocab_size=8, n_positions=8, n_embd=4, n_layer=1, n_head=1)
        >>> save_pretrained(transformers.GPT2Model(config), "memory://example/saved/")
        >>> [info.key for info in torchobj.Store("memory://example").list("saved/")]
        ['saved/config.json', 'saved/model.safetensors']
    """
    if not isinstance(model, transformers.PreTrainedModel):
        raise ConfigError(
            f"model: a {type(model).__name__}: must be a transformers.PreTrainedModel: pass what a wrapper wraps; a "
            "tokenizer alone is saved to a local folder, which torchobj.files.upload uploads"
        )
    _check_arguments("save_pretrained", kwargs, _NOT_SAVED)
    if not kwargs.get("safe_serialization", True):
        raise ConfigError("save_pretrained: safe_serialization=False: weights are written as safetensors")
    target = str(_folder_url(url))
    if getattr(model, "_hf_peft_config_loaded", False):
        raise UnsupportedError(
            f"save_pretrained {target}: the model has adapters of PEFT: merge them, or save to a local folder and call "
            "torchobj.files.upload"
        )
    with tempfile.TemporaryDirectory(prefix="torchobj-") as local:
        upload = _Upload(Path(local), target, tokenizer, store_config, writes=kwargs.get("is_main_process", True))
        with _redirected(upload):
            model.save_pretrained(local, **kwargs)
        upload.finish()


class _Upload:
    """The folder that transformers saves to: its files are sent, and those of weights are never written.

    Args:
        folder: The local folder.
        url: The folder in the bucket, with a slash at the end.
        tokenizer: Saved with the first file of weights.
        config: Settings of the store.
        writes: Whether this rank is the one that writes; transformers 4 writes weights on the others too.
    """

    def __init__(self, folder: Path, url: str, tokenizer: Any, config: StoreConfig | None, *, writes: bool) -> None:
        self.folder, self._writes = folder, writes
        self._url, self._tokenizer, self._config = url, tokenizer, config
        #: None before the first file of weights.
        self._sent: set[Path] | None = None

    def save_file(self, tensors: Any, name: str, metadata: Mapping[str, str] | None) -> None:
        """Sends a file of weights; before the first one, the files that are in the folder."""
        if not self._writes:
            return
        if self._sent is None:
            if self._tokenizer is not None:
                self._tokenizer.save_pretrained(self.folder)
            safetensors.clear(self._url, self._config, overwrite=True)
            files.upload(self.folder, self._url, config=self._config)
            self._sent = self._files()
        save(tensors, self._url + name, format="safetensors", metadata=metadata, config=self._config)

    def finish(self) -> None:
        """Sends the files that were written after the first file of weights, the index last.

        Raises:
            UnsupportedError: transformers wrote files, but no weights by its `safe_save_file`.
        """
        written = self._files()
        if written and self._sent is None:
            raise UnsupportedError(
                f"save_pretrained {self._url}: transformers {transformers.__version__} writes weights in another way: "
                "save to a local folder, and call torchobj.files.upload"
            )
        for path in sorted(written - (self._sent or set()), key=lambda path: (path.name == names.INDEX, path)):
            url = self._url + path.relative_to(self.folder).as_posix()
            files.upload_file(path, url, config=self._config)

    def _files(self) -> set[Path]:
        return {path for path in self.folder.rglob("*") if path.is_file()}


@contextlib.contextmanager
def _redirected(upload: _Upload) -> Iterator[None]:
    """Passes the weights that transformers writes to a folder to its upload."""
    writing: Any = transformers.modeling_utils
    with _redirecting:
        original: Any = getattr(writing, "safe_save_file", None)

        def save_file(tensors: Any, filename: Any, metadata: Mapping[str, str] | None = None) -> None:
            path = Path(filename)
            if path.parent == upload.folder:
                upload.save_file(tensors, path.name, metadata)
            else:
                original(tensors, filename, metadata)

        writing.safe_save_file = save_file
        try:
            yield
        finally:
            writing.safe_save_file = original
