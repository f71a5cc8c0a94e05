"""Models and tokenizers of transformers in a bucket are those that transformers loads from a local folder and saves to it."""

import json
import os
import pickle
import textwrap

import pytest
import torch

import torchobj
from tests.support import warm_python
from tests.support.long_tables import GCS_IN_MATRIX
from torchobj import exceptions
from torchobj.checkpoint.safetensors import names

transformers = pytest.importorskip("transformers")

from torchobj.transformers import from_pretrained, pretrained, save_pretrained  # noqa: E402

pytestmark = [
    pytest.mark.xdist_group("lightning"),
    # Of accelerate: transformers offloads as the test asks it to.
    pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules"),
]

SMALL = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2}
TOKENS = torch.arange(10)[None]


def llama(**changes):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**SMALL, **sizes, num_key_value_heads=2, max_position_embeddings=64, **changes)
    return transformers.LlamaForCausalLM(config)


def gpt2():
    """A model whose embedding and head are one tensor."""
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**SMALL, n_positions=64, n_embd=32, n_layer=2, n_head=4)
    )


def tokenizer():
    import tokenizers

    words = tokenizers.models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]")
    backend = tokenizers.Tokenizer(words)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
    made.chat_template = {"default": "{{ messages }}", "tools": "{{ tools }}"}
    return made


def files_of(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def objects_of(url):
    bucket, prefix = url.removeprefix("memory://").split("/", 1)
    store = torchobj.Store(f"memory://{bucket}")
    return {info.key.removeprefix(prefix): bytes(store.get(info.key)) for info in store.list(prefix)}


def put(url, **bodies):
    for name, body in bodies.items():
        with torchobj.open(url + name, "wb") as file:
            file.write(body)


@pytest.fixture
def url(request):
    """A folder of a bucket of this test."""
    return f"memory://pretrained-{abs(hash(request.node.name))}/model/"


def configuration_of(model):
    return {name: value for name, value in model.config.to_dict().items() if name != "_name_or_path"}


def check_same(model, expected):
    """Checks that two models have the same class, parameters, buffers, configurations and logits."""
    assert type(model) is type(expected)
    state, other = model.state_dict(), expected.state_dict()
    assert state.keys() == other.keys() and all(torch.equal(state[name], other[name]) for name in state)
    buffers = dict(expected.named_buffers())
    assert all(torch.equal(buffer, buffers.pop(name)) for name, buffer in model.named_buffers()) and not buffers
    assert configuration_of(model) == configuration_of(expected)
    assert getattr(model, "generation_config", None) == getattr(expected, "generation_config", None)
    assert not model.training
    with torch.no_grad():
        assert torch.equal(model(TOKENS)[0], expected(TOKENS)[0])


@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.parametrize("options", [{}, {"max_shard_size": "20KB"}], ids=["whole", "shards"])
def test_a_model_is_that_of_a_local_folder(make, options, url, tmp_path):
    model = make()
    model.generation_config.max_new_tokens = 7
    model.save_pretrained(tmp_path, **options)
    save_pretrained(model, url, **options)
    assert objects_of(url) == files_of(tmp_path)
    assert (names.INDEX in files_of(tmp_path)) == bool(options)
    for cls in (type(model), transformers.AutoModelForCausalLM, transformers.AutoModel):
        check_same(from_pretrained(cls, url.removesuffix("/")), cls.from_pretrained(tmp_path))


def test_tied_weights_are_saved_once_and_tied_again(url):
    save_pretrained(gpt2(), url)
    assert "lm_head.weight" not in torchobj.load(url, "meta")
    model = from_pretrained(transformers.GPT2LMHeadModel, url)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert (model.name_or_path, model.config.name_or_path) == (url, url)


@pytest.mark.providers("s3", GCS_IN_MATRIX)
def test_a_model_and_its_tokenizer_are_saved_to_a_bucket(bucket, tmp_path):
    model, words, target = llama(), tokenizer(), f"{bucket.url}/model"
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    words.save_pretrained(tmp_path)
    save_pretrained(model, target, words, store_config=bucket.config, max_shard_size="20KB")
    expected = files_of(tmp_path)
    assert {key.removeprefix("model/"): bucket.body(key) for key in bucket.keys()} == expected
    assert "additional_chat_templates/tools.jinja" in expected
    loaded = from_pretrained(transformers.AutoModelForCausalLM, target, store_config=bucket.config)
    check_same(loaded, transformers.AutoModelForCausalLM.from_pretrained(tmp_path))
    loaded = from_pretrained(transformers.AutoTokenizer, target, store_config=bucket.config)
    assert loaded.name_or_path == f"{target}/"
    assert (loaded("a b")["input_ids"], loaded.chat_template) == ([0, 1], words.chat_template)


def test_what_is_no_model_is_that_of_a_local_folder(url, tmp_path):
    image = transformers.ViTImageProcessor(size={"height": 8, "width": 8})
    for each in (tokenizer(), image, gpt2().generation_config, gpt2().config):
        each.save_pretrained(tmp_path / "from")
    torchobj.files.upload(tmp_path / "from", url)
    for cls in (
        transformers.AutoTokenizer,
        transformers.AutoImageProcessor,
        transformers.ViTImageProcessor,
        transformers.GenerationConfig,
        transformers.AutoConfig,
    ):
        ours, theirs = tmp_path / cls.__name__, tmp_path / f"{cls.__name__}-local"
        from_pretrained(cls, url).save_pretrained(ours)
        cls.from_pretrained(tmp_path / "from").save_pretrained(theirs)
        assert files_of(ours) == files_of(theirs) != {}


#: The arguments are those of transformers, and have its meaning.
ARGUMENTS = [
    {"dtype": torch.bfloat16},
    {"torch_dtype": "auto"},
    {"device_map": "cpu"},
    {"device_map": {"": "cpu"}},
    {"attn_implementation": "eager", "output_hidden_states": True},
    {"num_hidden_layers": 1},
]


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
@pytest.mark.parametrize("name", ["LlamaForCausalLM", pytest.param("AutoModelForCausalLM", marks=pytest.mark.matrix)])
def test_arguments_are_those_of_transformers(name, arguments, url, tmp_path):
    if "device_map" in arguments:
        pytest.importorskip("accelerate")
    cls = getattr(transformers, name)
    model = llama()
    model.save_pretrained(tmp_path)
    torchobj.files.upload(tmp_path, url)
    loaded, expected = from_pretrained(cls, url, **arguments), cls.from_pretrained(tmp_path, **arguments)
    check_same(loaded, expected)
    assert loaded.dtype == expected.dtype
    assert loaded.config._attn_implementation == expected.config._attn_implementation
    assert getattr(loaded, "hf_device_map", None) == getattr(expected, "hf_device_map", None)


def test_a_configuration_and_a_generation_configuration_can_be_passed(url):
    save_pretrained(llama(), url)
    config = transformers.LlamaConfig.from_dict(llama().config.to_dict() | {"num_hidden_layers": 1})
    config.auto_map = {"AutoConfig": "code.Config"}
    given = transformers.GenerationConfig(max_new_tokens=9)
    for cls in (transformers.LlamaForCausalLM, transformers.AutoModelForCausalLM):
        loaded, info = from_pretrained(cls, url, config=config, generation_config=given, output_loading_info=True)
        assert (len(loaded.model.layers), loaded.generation_config.max_new_tokens, loaded.name_or_path) == (1, 9, url)
        assert not info["missing_keys"]
    loaded = from_pretrained(transformers.AutoModelForCausalLM, url, use_safetensors=True, weights_only=False)
    assert torch.equal(loaded.lm_head.weight, llama().lm_head.weight)
    assert (config.num_hidden_layers, config.name_or_path, config.auto_map) == (1, "", {"AutoConfig": "code.Config"})


def test_weights_for_the_disk_are_written_where_transformers_is_told_to(url, tmp_path):
    pytest.importorskip("accelerate")
    save_pretrained(llama(), url)
    mapped = {"device_map": {"model": "disk", "lm_head": "cpu"}, "offload_folder": str(tmp_path / "offloaded")}
    loaded = from_pretrained(transformers.LlamaForCausalLM, url, **mapped)
    assert torch.equal(loaded(TOKENS).logits, llama().eval()(TOKENS).logits)
    assert (tmp_path / "offloaded" / "model.norm.weight.safetensors").exists()
    # The save reads them from there.
    other = url.replace("/model/", "/other/")
    save_pretrained(loaded, other)
    assert objects_of(other)[names.WHOLE] == objects_of(url)[names.WHOLE]


def test_quantised_weights_are_converted_by_transformers(url, tmp_path):
    model = llama()
    quantised = {}
    for name, tensor in model.state_dict().items():
        quantised[name] = tensor.to(torch.float8_e4m3fn) if "proj" in name else tensor
        if "proj" in name:
            quantised[name.replace("weight", "weight_scale_inv")] = torch.full((1, 1), 2.0)
    method = {"quant_method": "fp8", "dequantize": True, "weight_block_size": [128, 128]}
    put(url, **{"config.json": json.dumps(model.config.to_dict() | {"quantization_config": method}).encode()})
    torchobj.save(quantised, url, format="safetensors", metadata={"format": "pt"})
    torchobj.files.download(url, tmp_path)
    loaded = from_pretrained(transformers.AutoModelForCausalLM, url)
    check_same(loaded, transformers.AutoModelForCausalLM.from_pretrained(tmp_path))
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(loaded.get_parameter(name), 2 * quantised[name].float())


# Files on the local disk

TRACED = """
    import os, resource, signal, sys
    import torch, transformers, torchobj
    from torchobj.transformers import from_pretrained, save_pretrained

    sizes = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=512, **sizes))
    assert model.get_memory_footprint() > 1 << 20
    opened = []
    sys.addaudithook(lambda event, args: opened.append(args[0]) if event == "open" else None)
    # The kernel lets no file of this process grow beyond this, whatever language writes it.
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, 64 << 10))
    for options in ({}, {"max_shard_size": "300KB"}):
        save_pretrained(model, "memory://traced/model", **options)
        loaded = from_pretrained(transformers.AutoModelForCausalLM, "memory://traced/model")
        assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
    seen = [os.path.basename(str(path)) for path in opened]
    assert "config.json" in seen and not [name for name in seen if name.endswith((".safetensors", ".bin", ".pt"))]
    assert os.listdir(os.environ["TMPDIR"]) == []
    try:
        model.save_pretrained(os.environ["TMPDIR"] + "/local")
    except Exception as error:
        print("too large:", type(error).__name__)
"""


def test_no_file_of_weights_is_on_the_local_disk(tmp_path):
    # In a process of its own: an audit hook cannot be removed.
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = warm_python.run(["-c", textwrap.dedent(TRACED)], env=environment, check=True)
    # The limit would have stopped one: that of a save to the local disk does.
    assert done.stdout.startswith("too large: ")


# Saving


def test_earlier_weights_are_deleted_first_and_the_index_is_written_last(url, monkeypatch):
    save_pretrained(llama(), url, tokenizer(), max_shard_size="20KB")
    put(url, **{"README.md": b"kept"})
    small = sorted(name for name in objects_of(url) if ".safetensors" not in name)
    written = []

    def save(tensors, target, **options):
        written.append((target.removeprefix(url), sorted(objects_of(url))))
        if len(written) == 2:
            raise exceptions.StoreConnectionError("put: lost")
        return torchobj.save(tensors, target, **options)

    before = transformers.modeling_utils.safe_save_file
    monkeypatch.setattr(pretrained, "save", save)
    with pytest.raises(exceptions.StoreConnectionError):
        save_pretrained(llama(), url, tokenizer(), max_shard_size="20KB")
    assert transformers.modeling_utils.safe_save_file is before
    first, second = written
    assert first == ("model-00001-of-00006.safetensors", small) and {"config.json", "tokenizer.json"} < set(small)
    assert sorted(objects_of(url)) == second[1] == sorted([*small, first[0]])
    with pytest.raises(exceptions.CheckpointError, match="has no weights: none of model.safetensors, "):
        from_pretrained(transformers.LlamaForCausalLM, url)


def test_a_save_of_another_model_at_that_time_goes_to_its_folder(url, tmp_path):
    class Tokenizer:
        def save_pretrained(self, folder):
            gpt2().save_pretrained(tmp_path / "local")

    save_pretrained(llama(), url, Tokenizer())
    assert names.WHOLE in files_of(tmp_path / "local")
    assert "lm_head.weight" in torchobj.load(url, "meta")


def test_a_rank_that_does_not_save_writes_nothing(url):
    save_pretrained(llama(), url, tokenizer(), is_main_process=False)
    assert objects_of(url) == {}


def test_another_way_of_writing_weights_is_an_error(url, monkeypatch):
    write = transformers.modeling_utils.safe_save_file
    monkeypatch.setattr(
        transformers.LlamaForCausalLM, "save_pretrained", lambda self, folder: write({"a": TOKENS}, f"{folder}/x")
    )
    with pytest.raises(exceptions.UnsupportedError, match=r"transformers \S+ writes weights in another way"):
        save_pretrained(llama(), url)
    assert objects_of(url) == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"push_to_hub": True}, "push_to_hub=True: not supported"),
        ({"distributed_checkpoint": True}, "distributed_checkpoint=True: not supported"),
        ({"variant": "fp16"}, "variant='fp16': not supported"),
        ({"save_function": torch.save}, r"save_function=\.\.\.: not supported"),
        ({"safe_serialization": False}, "safe_serialization=False: weights are written as safetensors"),
    ],
    # Not by the text of a function, which has its address.
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_saves_that_a_url_cannot_have_are_refused(arguments, message, url):
    with pytest.raises(exceptions.ConfigError, match=message):
        save_pretrained(llama(), url, **arguments)
    with pytest.raises(exceptions.ConfigError, match=r"model: a Linear: must be a transformers\.PreTrainedModel"):
        save_pretrained(torch.nn.Linear(1, 1), url)
    adapted = llama()
    adapted._hf_peft_config_loaded = True
    with pytest.raises(exceptions.UnsupportedError, match="has adapters of PEFT"):
        save_pretrained(adapted, url)
    with pytest.raises(exceptions.ConfigError):
        save_pretrained(llama(), "folder/model")
    assert objects_of(url) == {}


# Folders of pickles, and bad input


def pickled(url, model, count):
    """Writes the weights as the pickles of earlier versions of transformers: one, or `count` with an index."""
    put(url, **{"config.json": json.dumps(model.config.to_dict()).encode()})
    state = model.state_dict()
    if count == 1:
        torchobj.save(state, f"{url}pytorch_model.bin")
        return
    shards = {name: f"pytorch_model-{number % count + 1:05}-of-{count:05}.bin" for number, name in enumerate(state)}
    for shard in set(shards.values()):
        torchobj.save({name: state[name] for name in state if shards[name] == shard}, url + shard)
    put(url, **{"pytorch_model.bin.index.json": json.dumps({"metadata": {}, "weight_map": shards}).encode()})


@pytest.mark.parametrize("count", [1, 3])
def test_pickled_weights_are_loaded(count, url, tmp_path):
    pickled(url, gpt2(), count)
    torchobj.files.download(url, tmp_path)
    for cls in (transformers.GPT2LMHeadModel, transformers.AutoModelForCausalLM):
        check_same(from_pretrained(cls, url), cls.from_pretrained(tmp_path))
    with pytest.raises(exceptions.ConfigError, match="weights_only=False would run code of the pickle"):
        from_pretrained(transformers.GPT2LMHeadModel, url, weights_only=False)
    with pytest.raises(exceptions.CheckpointError, match=f"has no weights: none of {names.WHOLE}, {names.INDEX}$"):
        from_pretrained(transformers.GPT2LMHeadModel, url, use_safetensors=True)
    # As for local folders, safetensors precede them.
    other = gpt2()
    torch.nn.init.zeros_(other.lm_head.weight)
    save_pretrained(other, url)
    assert not from_pretrained(transformers.GPT2LMHeadModel, url).lm_head.weight.any()
    assert from_pretrained(transformers.GPT2LMHeadModel, url, use_safetensors=False).lm_head.weight.any()


class Code:
    def __reduce__(self):
        return open, (os.environ["PWNED"], "w")


def test_no_code_of_a_folder_is_run(url, tmp_path, monkeypatch):
    marker = tmp_path / "ran"
    monkeypatch.setenv("PWNED", str(marker))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("transformers asks whether to run code"))
    code = f"open({str(marker)!r}, 'w')\n".encode()
    named = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model", "AutoTokenizer": ["code.T", None]}
    save_pretrained(llama(), url, tokenizer())
    put(url, **{"code.py": code})
    for name in ("config.json", "tokenizer_config.json"):
        changed = json.loads(objects_of(url)[name]) | {"auto_map": named}
        put(url, **{name: json.dumps(changed).encode()})
    # transformers has a class for it: the code is not needed.
    for cls in (transformers.LlamaForCausalLM, transformers.AutoModelForCausalLM):
        loaded = from_pretrained(cls, url)
        assert type(loaded) is transformers.LlamaForCausalLM and not hasattr(loaded.config, "auto_map")
    # It has none.
    put(url, **{"config.json": json.dumps({"model_type": "unheard-of", "auto_map": named}).encode()})
    with pytest.raises(exceptions.CheckpointError, match="auto_map names code, and code in a bucket is never run"):
        from_pretrained(transformers.AutoModelForCausalLM, url)
    changed["tokenizer_class"] = "UnheardOfTokenizer"
    put(url, **{"tokenizer_config.json": json.dumps(changed).encode()})
    with pytest.raises(exceptions.CheckpointError, match="auto_map names code, and code in a bucket is never run"):
        from_pretrained(transformers.AutoTokenizer, url)
    for trusted in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer):
        with pytest.raises(exceptions.ConfigError, match="trust_remote_code=True: not supported for URLs: code in a"):
            from_pretrained(trusted, url, trust_remote_code=True)
    # A class of models for which transformers has no configuration of this kind.
    put(url, **{"config.json": json.dumps({"model_type": "vit", "auto_map": named}).encode()})
    with pytest.raises(exceptions.CheckpointError, match="AutoModelForCausalLM has no model for ViTConfig; code in a"):
        from_pretrained(transformers.AutoModelForCausalLM, url)
    # A pickle that runs code when it is loaded.
    put(
        url, **{"config.json": json.dumps(llama().config.to_dict()).encode(), "pytorch_model.bin": pickle.dumps(Code())}
    )
    torchobj.Store(url.removesuffix("model/")).delete("model/model.safetensors")
    with pytest.raises(exceptions.CheckpointError):
        from_pretrained(transformers.LlamaForCausalLM, url)
    torchobj.save({"a": Code()}, f"{url}pytorch_model.bin")
    with pytest.raises(exceptions.CheckpointError):
        from_pretrained(transformers.LlamaForCausalLM, url)
    assert not marker.exists()


CONFIG = json.dumps({"model_type": "gpt2", **SMALL, "n_positions": 8, "n_embd": 4, "n_layer": 1, "n_head": 1}).encode()


def index(*files, key="weight_map"):
    return json.dumps({key: {f"t{number}": file for number, file in enumerate(files)}}).encode()


@pytest.mark.parametrize(
    ("bodies", "message"),
    [
        ({}, "has no config.json; save_pretrained writes such folders"),
        ({"model.safetensors": b""}, "has no config.json"),
        ({"config.json": b"{"}, "config.json"),
        ({"config.json": b"[" * 100_000}, "from_pretrained memory://"),
        ({"config.json": b"[]"}, "from_pretrained memory://"),
        ({"config.json": CONFIG}, "has no weights: none of model.safetensors, model.safetensors.index.json, pytorch_"),
        (
            {"config.json": CONFIG, "model.safetensors": b"\xff" * 40},
            "model.safetensors: it is not a file of safetensors",
        ),
        ({"config.json": CONFIG, names.INDEX: index("../x.safetensors")}, r"'\.\./x\.safetensors': not a file of"),
        ({"config.json": CONFIG, names.INDEX: index("x.safetensors")}, "x.safetensors: does not exist, but the index"),
        ({"config.json": CONFIG, "pytorch_model.bin.index.json": index("../x.bin")}, r"names '\.\./x\.bin', which is"),
        ({"config.json": CONFIG, "pytorch_model.bin.index.json": index(3)}, "names '3', which is not in this folder"),
        ({"config.json": CONFIG, "pytorch_model.bin.index.json": index([])}, "index.json: the index is damaged"),
        ({"config.json": CONFIG, "pytorch_model.bin.index.json": b"[]"}, "index.json: the index is damaged"),
        ({"config.json": CONFIG, "pytorch_model.bin.index.json": b"{" * 9999}, "index.json: the index is damaged"),
        ({"config.json": CONFIG, "pytorch_model.bin": b"no pickle"}, "pytorch_model.bin"),
        ({"config.json": CONFIG[:-1] + b', "transformers_weights": "../x.safetensors"}'}, r"none of \.\./x\.safet"),
    ],
    ids=range(16),
)
def test_bad_folders_are_errors_that_name_the_url(bodies, message, url):
    torchobj.save({"a": TOKENS}, url.replace("model/", "x.safetensors"))
    torchobj.save({"a": TOKENS}, url.replace("model/", "x.bin"))
    put(url, **bodies)
    for cls in (transformers.GPT2LMHeadModel, transformers.AutoModelForCausalLM):
        with pytest.raises(exceptions.CheckpointError, match=message) as caught:
            from_pretrained(cls, url)
        assert url in str(caught.value) and "/tmp" not in str(caught.value)


def test_a_pickle_of_something_else_is_an_error(url):
    put(url, **{"config.json": CONFIG})
    torchobj.save([1], f"{url}pytorch_model.bin")
    with pytest.raises(exceptions.CheckpointError, match="pytorch_model.bin: a list, not a state_dict"):
        from_pretrained(transformers.GPT2LMHeadModel, url)


def test_what_is_copied_is_limited(url, monkeypatch):
    put(url, **{"config.json": CONFIG, "tokenizer.json": b"{}", "weights.bin": bytes(2000), "x\\..\\y.json": b"{}"})
    monkeypatch.setattr(pretrained, "_SMALL_BYTES", 100)
    with pytest.raises(exceptions.CheckpointError, match=r"have \d+ bytes, config\.json \d+; the limit is 100"):
        from_pretrained(transformers.GPT2LMHeadModel, url)
    assert sorted(pretrained._Folder(url, None).small_files()) == ["config.json", "tokenizer.json"]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"subfolder": "x"}, exceptions.ConfigError, "subfolder='x': not supported for URLs: append it to the URL"),
        ({"variant": "fp16"}, exceptions.ConfigError, "variant='fp16': not supported"),
        ({"gguf_file": "x.gguf"}, exceptions.ConfigError, "gguf_file='x.gguf': not supported"),
        ({"state_dict": {"a": TOKENS}}, exceptions.ConfigError, r"state_dict=\.\.\.: not supported"),
        ({"config": torchobj.StoreConfig()}, exceptions.ConfigError, "must be a configuration of transformers"),
        ({"cls": 3}, exceptions.ConfigError, "cls=3: must be a class of transformers"),
        ({"url": "meta/llama"}, exceptions.ConfigError, "meta/llama"),
        ({}, exceptions.UnsupportedError, "has adapters of PEFT, which need a local folder"),
    ],
    ids=str,
)
def test_loads_that_a_url_cannot_have_are_refused(arguments, error, message, url):
    save_pretrained(llama(), url)
    put(url, **{"adapter_config.json": b"{}"})
    with pytest.raises(error, match=message):
        from_pretrained(**{"cls": transformers.AutoModelForCausalLM, "url": url, **arguments})


def test_weights_of_torchao_need_a_local_folder(url):
    save_pretrained(llama(), url)
    config = json.loads(objects_of(url)["config.json"]) | {"quantization_config": {"quant_method": "torchao"}}
    put(url, **{"config.json": json.dumps(config).encode()})
    with pytest.raises(exceptions.UnsupportedError, match="weights of torchao need a local folder"):
        from_pretrained(transformers.AutoModelForCausalLM, url)
