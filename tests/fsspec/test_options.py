"""Options of s3fs and gcsfs: which fields of the configuration they set, and where their secrets are."""

import asyncio
import json
import os
import pickle
import subprocess
import sys

import fsspec
import pytest
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper

import torchobj
from tests.support.file_systems import InMemory
from torchobj import AdvancedOptions, GCSOptions, S3Options, StoreConfig, exceptions
from torchobj.fsspec import GCSFileSystem, ObjectFileSystem, instances
from torchobj.warn_once import PROCESS

KEY, SECRET, TOKEN = "canary-KEY-id", "canary8SECRET", "canary8TOKEN"


@pytest.fixture(autouse=True)
def own_state(monkeypatch):
    monkeypatch.setattr(instances, "_default", None)
    monkeypatch.setattr(PROCESS, "_once", {})


def s3_of(**options):
    return ObjectFileSystem(**options)._config.s3


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({"anon": True}, {"anonymous": True}),
        ({"anon": None, "requester_pays": True}, {"requester_pays": True}),
        ({"profile": "minio"}, {"profile": "minio"}),
        ({"endpoint_url": "http://a:1", "anon": True}, {"endpoint_url": "http://a:1", "anonymous": True}),
        (
            {"client_kwargs": {"endpoint_url": "http://a:1", "region_name": "eu-west-1"}},
            {"endpoint_url": "http://a:1", "region": "eu-west-1"},
        ),
        (
            {"client_kwargs": {"endpoint_url": "http://a:1"}, "endpoint_url": "http://b:2"},
            {"endpoint_url": "http://b:2"},
        ),
        ({"config_kwargs": {"s3": {"addressing_style": "virtual"}}}, {"addressing_style": "virtual"}),
        (
            {
                "s3_additional_kwargs": {
                    "ServerSideEncryption": "aws:kms",
                    "SSEKMSKeyId": "k",
                    "StorageClass": "GLACIER",
                }
            },
            {"encryption": "aws:kms", "kms_key_id": "k", "storage_class": "GLACIER"},
        ),
    ],
)
def test_options_of_s3fs_set_fields(options, fields, caplog):
    assert s3_of(**options) == S3Options(**fields)
    assert caplog.text == ""


def test_options_of_botocore_set_shared_fields(tmp_path):
    config_kwargs = {"connect_timeout": 1, "read_timeout": 2, "retries": {"total_max_attempts": 3}}
    config = ObjectFileSystem(config_kwargs=config_kwargs, client_kwargs={"verify": str(tmp_path)})._config
    assert config == StoreConfig(
        advanced=AdvancedOptions(connect_timeout_s=1),
        first_byte_timeout_s=2,
        idle_timeout_s=2,
        max_attempts=3,
        ca_bundle=str(tmp_path),
    )


def test_an_option_of_the_file_system_overrides_that_of_botocore():
    kwargs = {"region_name": "client", "aws_access_key_id": "client", "aws_secret_access_key": "client"}
    given = s3_of(
        client_kwargs=kwargs,
        config_kwargs={"region_name": "config"},
        s3_additional_kwargs={"RequestPayer": "requester"},
        requester_pays=False,
        username="user",
        secret=SECRET,
    )
    assert (given.region, given.requester_pays) == ("client", False)
    assert given.credential_provider()["access_key_id"] == "client"
    assert given.credential_provider()["secret_access_key"] == SECRET
    assert s3_of(config_kwargs={"signature_version": "unsigned"}, anon=False).anonymous is False
    assert s3_of(config_kwargs={"region_name": "config"}).region == "config"


def test_options_without_effect_are_named_by_their_place(caplog):
    ObjectFileSystem(
        use_ssl=False,
        block_size=1,
        use_listings_cache=False,
        version_aware=True,
        client_kwargs={"use_ssl": False, "api_version": None},
        config_kwargs={
            "s3": {"payload_signing_enabled": True},
            "retries": {"mode": "standard"},
            "signature_version": "s3",
        },
        s3_additional_kwargs={"ACL": "private", "RequestPayer": "other"},
    )
    assert (
        "ignored block_size, client_kwargs['use_ssl'], config_kwargs['s3']['payload_signing_enabled'], "
        "config_kwargs['signature_version'], s3_additional_kwargs['ACL'], s3_additional_kwargs['RequestPayer'], "
        "use_ssl=False (the scheme of endpoint_url decides), version_aware, which"
    ) in caplog.text
    with pytest.raises(exceptions.ConfigError, match="client_kwargs as <class 'list'>: must be a dict"):
        ObjectFileSystem(client_kwargs=["x"])


def test_the_unsigned_version_of_botocore_is_anonymous():
    from botocore import UNSIGNED

    assert s3_of(config_kwargs={"signature_version": UNSIGNED}).anonymous


@pytest.mark.parametrize(
    "options",
    [
        {"key": KEY, "secret": SECRET, "token": TOKEN},
        {"username": KEY, "password": SECRET, "token": TOKEN},
        {"client_kwargs": {"aws_access_key_id": KEY, "aws_secret_access_key": SECRET, "aws_session_token": TOKEN}},
    ],
)
def test_keys_become_a_credential_provider_and_are_shown_nowhere(options, caplog):
    caplog.set_level(1)
    files = ObjectFileSystem(**options)
    provided = files._config.s3.credential_provider()
    assert provided == {"access_key_id": KEY, "secret_access_key": SECRET, "token": TOKEN, "expires_at": None}
    shown = [repr(files), str(files.storage_options), str(files.storage_args), repr(files._config), files._fs_token]
    shown += [repr(files._config.s3.credential_provider), str(vars(files)), caplog.text]
    shown += [pickle.dumps(thing).decode("latin-1") for thing in (files, files._config)]
    for text in shown:
        assert not any(secret in text for secret in (KEY, SECRET, TOKEN))


def test_equal_keys_share_an_instance_and_others_do_not():
    files = ObjectFileSystem(key=KEY, secret=SECRET)
    assert ObjectFileSystem(key=KEY, secret=SECRET) is files
    assert ObjectFileSystem(key=KEY, secret="other") is not files
    assert ObjectFileSystem(key=KEY, secret="other")._fs_token != files._fs_token
    assert pickle.loads(pickle.dumps(files)) is files


def run(script, data, **environment):
    """Runs a script in a new process, which receives `data` from its input."""
    return subprocess.run([sys.executable, "-c", script], input=data, capture_output=True, env=environment, check=False)


CALLS_PROVIDER = (
    "import pickle, sys; files = pickle.load(sys.stdin.buffer); print(files._config.s3.credential_provider())"
)


def test_a_pickled_file_system_takes_the_same_keys_from_the_environment_of_its_process(monkeypatch):
    data = pickle.dumps(ObjectFileSystem(key=KEY, secret=SECRET))
    done = run(CALLS_PROVIDER, data, **os.environ, AWS_ACCESS_KEY_ID=KEY, AWS_SECRET_ACCESS_KEY=SECRET)
    assert SECRET in done.stdout.decode(), done.stderr
    for others in ({}, {"AWS_ACCESS_KEY_ID": "another", "AWS_SECRET_ACCESS_KEY": SECRET}):
        failed = run(CALLS_PROVIDER, data, **os.environ, **others)
        assert (
            b"CredentialsError: the key and secret that were passed to the file system are not pickled" in failed.stderr
        )
        assert SECRET.encode() not in failed.stderr


def test_options_override_the_registered_configuration():
    instances.set_default_config(StoreConfig(s3=S3Options(endpoint_url="http://a:1", profile="p"), max_attempts=2))
    files = ObjectFileSystem(anon=True)
    assert files._config == StoreConfig(
        s3=S3Options(endpoint_url="http://a:1", profile="p", anonymous=True), max_attempts=2
    )
    with_keys = ObjectFileSystem(key=KEY, secret=SECRET)._config
    assert (with_keys.s3.endpoint_url, with_keys.s3.profile, with_keys.max_attempts) == ("http://a:1", None, 2)
    assert ObjectFileSystem(StoreConfig(), anon=True)._config == StoreConfig(s3=S3Options(anonymous=True))


def test_options_of_fsspecs_own_configuration_are_used_and_hidden(monkeypatch):
    monkeypatch.setitem(fsspec.config.conf, "s3", {"key": KEY, "secret": SECRET, "endpoint_url": "http://a:1"})
    files = ObjectFileSystem()
    assert files._config.s3.credential_provider()["secret_access_key"] == SECRET
    assert files._config.s3.endpoint_url == "http://a:1"
    assert SECRET not in str(files.storage_options)
    assert ObjectFileSystem(endpoint_url="http://b:2")._config.s3.endpoint_url == "http://b:2"


def test_options_without_effect_are_logged_once(caplog):
    options = {"block_size": 1, "use_ssl": False, "client_kwargs": {"api_version": "x"}, "hf": {"token": SECRET}}
    for _ in range(2):
        assert ObjectFileSystem(**options)._config == StoreConfig()
    assert len(caplog.records) == 1
    assert "ignored block_size, client_kwargs['api_version'], use_ssl=False" in caplog.text
    assert SECRET not in caplog.text


@pytest.mark.parametrize("kind", [ObjectFileSystem, GCSFileSystem])
def test_what_libraries_pass_to_every_file_system_is_not_logged(kind, caplog):
    files = kind(asynchronous=True, loop=object(), hf={"token": SECRET}, use_listings_cache=False)
    assert files._config == StoreConfig()
    assert caplog.records == []


def test_a_file_system_is_used_from_coroutines_as_zarr_does(fsspec_registry):
    async def write_and_read(files):
        await files._pipe_file("zarr/c/0", b"chunk")
        return await files._cat_ranges(["zarr/c/0", "zarr/c/0"], [0, 1], [2, 3])

    fsspec_registry["s3"] = InMemory
    files = fsspec.filesystem("s3", asynchronous=True)
    wrapped = AsyncFileSystemWrapper(files, asynchronous=True)
    assert asyncio.run(write_and_read(wrapped)) == [b"ch", b"hu"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key": KEY}, "secret as .*: key and secret must both be strings"),
        ({"key": KEY, "secret": 1}, "secret as <class 'int'>"),
        ({"token": TOKEN}, "key as .*NoneType"),
        ({"client_kwargs": [SECRET]}, "client_kwargs as <class 'list'>: must be a dict"),
        ({"anon": "yes"}, "anonymous='yes'"),
    ],
)
def test_invalid_options_are_refused_without_their_secrets(options, message):
    with pytest.raises(exceptions.ConfigError, match=message) as caught:
        ObjectFileSystem(**options)
    assert not any(secret in str(caught.value) for secret in (KEY, SECRET, TOKEN))


def test_unknown_options_are_refused():
    for kind in (ObjectFileSystem, GCSFileSystem):
        with pytest.raises(TypeError, match="unknown options: anonymus"):
            kind(anonymus=True)


def gcs_of(**options):
    return GCSFileSystem(**options)._config.gcs


def test_options_of_gcsfs_set_fields(monkeypatch):
    monkeypatch.delenv("GOOGLE_CLOUD_PROJECT", raising=False)
    assert gcs_of(token="anon") == GCSOptions(anonymous=True)
    assert gcs_of(token="google_default", project="p") == gcs_of(project="p") == GCSOptions()
    assert gcs_of(project="p", requester_pays=True) == gcs_of(requester_pays="p") == GCSOptions(user_project="p")
    assert GCSFileSystem(requests_timeout=7)._config == StoreConfig(first_byte_timeout_s=7)
    with pytest.raises(exceptions.ConfigError, match="requires project="):
        gcs_of(requester_pays=True)
    with pytest.raises(exceptions.ConfigError, match="gcloud auth application-default login"):
        gcs_of(token="browser")
    with pytest.raises(exceptions.ConfigError, match="token as <class 'int'>"):
        gcs_of(token=5)


def test_a_token_of_gcsfs_is_provided_and_not_pickled():
    files = GCSFileSystem(token=TOKEN)
    assert files._config.gcs.credential_provider() == {"token": TOKEN, "expires_at": None}
    assert GCSFileSystem(token=TOKEN) is files
    data = pickle.dumps(files)
    assert pickle.loads(data) is files
    for text in (data.decode("latin-1"), repr(files._config), str(files.storage_options), str(vars(files))):
        assert TOKEN not in text
    failed = run(CALLS_PROVIDER.replace(".s3.", ".gcs."), data, **os.environ)
    assert b"CredentialsError: the token that was passed to the file system is not pickled" in failed.stderr


class Renewed:
    """Credentials of google-auth."""

    valid, token, expiry = False, None, None

    def refresh(self, request):
        self.valid, self.token = True, TOKEN


def test_credentials_of_google_auth_are_renewed():
    assert gcs_of(token=Renewed()).credential_provider() == {"token": TOKEN, "expires_at": None}


def test_a_file_of_credentials_is_pickled_as_its_path(tmp_path):
    file = tmp_path / "user.json"
    info = {"type": "authorized_user", "client_id": "c", "client_secret": SECRET, "refresh_token": TOKEN}
    file.write_text(json.dumps(info))
    files = GCSFileSystem(token=str(file))
    assert GCSFileSystem(token=str(file)) is files
    data = pickle.dumps(files)
    assert SECRET not in data.decode("latin-1")
    assert pickle.loads(data) is files
    assert gcs_of(token=info) == gcs_of(token=dict(info))
    assert SECRET not in pickle.dumps(GCSFileSystem(token=info)).decode("latin-1")
    with pytest.raises(exceptions.ConfigError, match="file that does not exist"):
        gcs_of(token=str(tmp_path / "no.json"))


def test_the_schemes_are_entry_points_of_the_package():
    import tomllib
    from importlib.metadata import EntryPoint
    from pathlib import Path

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    points = project["entry-points"]["fsspec.specs"]
    found = {name: EntryPoint(name, value, "fsspec.specs").load() for name, value in points.items()}
    assert found == {"tobj+s3": torchobj.fsspec.ObjectFileSystem, "tobj+gs": torchobj.fsspec.GCSFileSystem}


def test_fsspec_finds_an_installed_package_without_register(tmp_path):
    info = tmp_path / "torchobj-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torchobj\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[fsspec.specs]\ntobj+gs = torchobj.fsspec:GCSFileSystem\ntobj+s3 = torchobj.fsspec:ObjectFileSystem\n"
    )
    script = (
        "import fsspec, sys; files, path = fsspec.url_to_fs('tobj+s3://bucket/k', anon=True);"
        "assert 'torch' not in sys.modules; print(type(files).__name__, path);"
        "print(type(fsspec.filesystem('tobj+gs')).__name__)"
    )
    folders = os.pathsep.join([str(tmp_path), *sys.path])
    done = run(script, b"", **os.environ | {"PYTHONPATH": folders})
    assert done.stdout.decode().split() == ["ObjectFileSystem", "bucket/k", "GCSFileSystem"], done.stderr
