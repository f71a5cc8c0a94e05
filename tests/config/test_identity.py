"""Whose credentials sign requests of S3: each source, beside each other one, with botocore as the oracle."""

import contextlib

import pytest

import torchobj
from tests.servers.certificates import make_certificates
from tests.support import identities
from tests.support.identities import ERROR, SECRET, SOURCES, Source, keys, role
from tests.support.settings import s3_config
from torchobj import exceptions


@pytest.fixture(scope="module")
def server():
    with identities.serving() as started:
        yield started


@pytest.fixture
def endpoint(server):
    server.seen.clear()
    return f"http://127.0.0.1:{server.server_port}"


@pytest.fixture
def environment(endpoint, tmp_path_factory):
    """A context manager that sets the environment and the files of a source, in a home of its own."""

    @contextlib.contextmanager
    def applied(source):
        with pytest.MonkeyPatch.context() as variables:
            home = tmp_path_factory.mktemp("home")
            identities.apply(source, endpoint, home, variables)
            yield home

    return applied


@pytest.fixture
def signers(environment, endpoint):
    """Returns who signs with a source: for botocore, for torchobj, and for its requests through the SDK."""

    def found(source):
        with environment(source):
            ours = [identities.signer(source.options, endpoint, force_sdk=force_sdk) for force_sdk in (False, True)]
            return identities.signer_of_botocore(source.options), *ours

    return found


def error_of(config):
    with pytest.raises(exceptions.CredentialsError) as caught:
        torchobj.Store("s3://bucket", config=config).get("key")
    assert SECRET not in str(caught.value)
    return str(caught.value)


#: Who signs if a source is alone.
ALONE = {
    "nothing": ERROR,
    "explicit keys": "EXPLICIT",
    "credential_provider": "PROVIDED",
    "profile=": "OPTION",
    "profile= without keys": ERROR,
    "profile= of a role": "OPTIONROLE-BY-T",
    "profile= of a web identity": "OPTIONWEB-BY-TOKEN",
    "profile= that does not exist": ERROR,
    "AWS_DEFAULT_PROFILE": "DEFAULTPROFILE",
    "AWS_PROFILE": "PROFILE",
    "AWS_PROFILE of the config file": "CONFIGPROFILE",
    "AWS_PROFILE with spaces": "SPACES",
    "AWS_PROFILE with spaces in credentials": "SPACES2",
    "AWS_PROFILE with odd letters": "ODD",
    "AWS_PROFILE with spaces and no quotes": ERROR,
    "AWS_PROFILE that does not exist": ERROR,
    "AWS_DEFAULT_PROFILE that does not exist": ERROR,
    "empty AWS_PROFILE": ERROR,
    "environment": "ENVIRONMENT",
    "environment with a token": "TEMPORARY",
    "half a pair: the id": ERROR,
    "half a pair: the secret": ERROR,
    "empty keys": ERROR,
    "web identity": "IRSA-BY-TOKEN",
    "web identity without a role": ERROR,
    "role without a token": ERROR,
    "[default] of credentials": "DEFAULT",
    "half of [default] of credentials": ERROR,
    "[default] of config": "CONFIGDEFAULT",
    "[profile default]": "PROFILEDEFAULT",
    "role of [default]": "DEFAULTROLE-BY-BASE",
    "role of a role": "OUTER-BY-INNER-BY-BASE",
    "role of its own keys": "SELF-BY-OWN",
    "role that leads back": ERROR,
    "role without a source": ERROR,
    "role of a profile that does not exist": ERROR,
    "role of a process": "OFPROCESS-BY-PROCESS",
    "role of the environment": ERROR,
    "role of the container": ERROR,
    "role of the machine": ERROR,
    "role with both sources": ERROR,
    "web identity of [default]": "FILE-BY-TOKEN",
    "SSO of [default]": "SSO-legacy",
    "SSO session of [default]": "SSO-session",
    "SSO session that is repeated": "SSO-repeated",
    "SSO without a session": ERROR,
    "SSO of a start URL only": ERROR,
    "process of [default]": "PROCESS",
    "boto 2": "BOTO2",
    "container": "CONTAINER",
    "machine": "INSTANCE",
}

#: Pairs of the table that `make test` runs, and who signs.
PAIRS = {
    ("AWS_DEFAULT_PROFILE", "AWS_PROFILE"): "DEFAULTPROFILE",
    ("web identity", "[default] of credentials"): "IRSA-BY-TOKEN",
    ("web identity", "role of [default]"): "DEFAULTROLE-BY-BASE",
    ("web identity", "web identity of [default]"): "IRSA-BY-TOKEN",
    ("environment", "AWS_PROFILE"): "ENVIRONMENT",
    ("environment", "profile="): "OPTION",
    ("environment", "AWS_PROFILE that does not exist"): ERROR,
    ("environment", "role of the environment"): "ENVIRONMENT",
    ("web identity", "profile="): "OPTION",
    ("web identity", "profile= of a web identity"): "OPTIONWEB-BY-TOKEN",
    ("role without a token", "web identity of [default]"): "ALONE-BY-TOKEN",
    ("container", "profile= without keys"): "CONTAINER",
    ("container", "role of the container"): "OFCONTAINER-BY-CONTAINER",
    ("machine", "role of the machine"): "OFINSTANCE-BY-INSTANCE",
    ("process of [default]", "[default] of config"): "PROCESS",
    ("process of [default]", "[default] of credentials"): "DEFAULT",
    ("SSO of [default]", "[default] of credentials"): "SSO-legacy",
    ("half a pair: the id", "AWS_PROFILE"): ERROR,
    ("half a pair: the secret", "AWS_PROFILE"): "PROFILE",
    ("explicit keys", "AWS_PROFILE that does not exist"): ERROR,
    ("explicit keys", "environment"): "EXPLICIT",
}


#: Sources that `make test` runs alone; the others are in the matrix.
FEW = [
    "credential_provider",
    "profile= without keys",
    "profile= that does not exist",
    "AWS_DEFAULT_PROFILE",
    "AWS_PROFILE with spaces",
    "AWS_PROFILE with odd letters",
    "half a pair: the id",
    "role of a role",
    "role that leads back",
    "SSO session of [default]",
    "boto 2",
    "machine",
]


@pytest.mark.parametrize(
    "names", [FEW, pytest.param(sorted(SOURCES.keys() - set(FEW)), marks=pytest.mark.matrix)], ids=["few", "others"]
)
def test_each_source_signs_as_for_botocore(signers, names):
    found = {name: signers(SOURCES[name]) for name in names}
    assert {name: who for name, who in found.items() if who != (ALONE[name],) * 3} == {}


def test_of_two_sources_that_of_botocore_signs(signers):
    found = {names: signers(SOURCES[names[0]].beside(SOURCES[names[1]])) for names in PAIRS}
    assert {names: who for names, who in found.items() if who != (PAIRS[names],) * 3} == {}


@pytest.mark.matrix
@pytest.mark.parametrize("first", SOURCES)
def test_each_source_beside_each_other_one_signs_as_for_botocore(signers, first):
    # Each client of botocore fails beside a session of SSO that does not exist, although another source signs.
    others = [
        name for name in list(SOURCES)[list(SOURCES).index(first) + 1 :] if "SSO without a session" not in (name, first)
    ]
    beside = {second: SOURCES[first].beside(SOURCES[second]) for second in others}
    found = {second: signers(source) for second, source in beside.items() if source is not None}
    assert {second: who for second, who in found.items() if len(set(who)) > 1} == {}


def test_a_profile_that_does_not_exist_is_named_with_its_variable_and_the_files(environment, endpoint):
    for variable in ("AWS_PROFILE", "AWS_DEFAULT_PROFILE"):
        for options in ({}, {"access_key_id": "EXPLICIT", "secret_access_key": SECRET}):
            with environment(Source({variable: "no such"})) as home:
                words = error_of(s3_config(endpoint_url=endpoint, **options))
            assert f'the profile "no such" does not exist in {home}/.aws/config or {home}/.aws/credentials' in words
            assert f"({variable} names it)" in words
            assert 'a name with spaces is written [profile "no such"]' in words


@pytest.mark.parametrize("force_sdk", [False, True])
@pytest.mark.parametrize("nested", [False, pytest.param(True, marks=pytest.mark.matrix)])
def test_a_role_that_needs_a_code_is_an_error_with_a_remedy(
    environment, endpoint, server, monkeypatch, force_sdk, nested
):
    monkeypatch.setattr("getpass.getpass", lambda *_: pytest.fail("nothing prompts"))
    mfa = role("MFA", source_profile="base", mfa_serial="arn:aws:iam::1:mfa/u")
    profiles = {"profile base": keys("BASE"), "profile 'my mfa'": mfa}
    profiles["profile outer"] = role("OUTER", source_profile="my mfa")
    with environment(Source(config=profiles)):
        profile = "outer" if nested else "my mfa"
        words = error_of(s3_config(endpoint_url=endpoint, profile=profile, force_sdk=force_sdk))
    assert "the role needs a code of mfa_serial=arn:aws:iam::1:mfa/u" in words
    assert "aws configure export-credentials --profile 'my mfa' --format env" in words
    assert server.seen == []


@pytest.mark.parametrize("force_sdk", [False, True])
def test_the_settings_of_a_role_are_sent(environment, endpoint, server, force_sdk):
    settings = {"external_id": "external", "role_session_name": "me", "duration_seconds": "900"}
    profiles = {
        "profile r": role("R", source_profile="base", region="eu-north-1", **settings),
        "profile base": keys("B"),
    }
    with environment(Source(config=profiles)):
        assert identities.signer({"profile": "r"}, endpoint, force_sdk=force_sdk) == "R-BY-B"
    (sent,) = server.seen
    names = ("ExternalId", "RoleSessionName", "DurationSeconds", "region")
    # The region of the environment precedes that of the profile.
    assert [sent[name] for name in names] == ["external", "me", "900", "eu-west-3"]


@pytest.mark.parametrize(
    ("environ", "setting", "region"),
    [
        ({}, "legacy", "us-east-1"),
        pytest.param({}, "regional", "eu-west-3", marks=pytest.mark.matrix),
        pytest.param({"AWS_STS_REGIONAL_ENDPOINTS": "regional"}, "legacy", "eu-west-3", marks=pytest.mark.matrix),
    ],
)
def test_sts_regional_endpoints_selects_the_region_of_roles(environment, endpoint, server, environ, setting, region):
    default = role("R", source_profile="base", sts_regional_endpoints=setting)
    with environment(Source(environ, config={"default": default, "profile base": keys("B")})):
        assert identities.signer({}, endpoint) == "R-BY-B"
    assert [sent["region"] for sent in server.seen] == [region]


@pytest.mark.parametrize("base", ["web identity of [default]", "role of [default]"])
def test_endpoints_of_a_profile_with_spaces_serve_its_role_and_its_objects(environment, endpoint, monkeypatch, base):
    services = {"s3": "\n  endpoint_url = {server}", "sts": "\n  endpoint_url = {server}/sts/"}
    profile = {**SOURCES[base].config["default"], "services": "s"}
    config = {"profile 'x y'": profile, "profile base": keys("BASE"), "services s": services}
    with environment(Source({"AWS_DEFAULT_PROFILE": "x y"}, config=config)):
        monkeypatch.delenv("AWS_ENDPOINT_URL_STS", raising=False)
        assert bytes(memoryview(torchobj.Store("s3://bucket").get("key"))).decode() == ALONE[base]


#: Prints keys whose id has the arguments.
ARGUMENTS = """for word in "$@"; do id="$id-$(printf %s "$word" | od -An -tx1 | tr -d ' \\n')"; done
printf '{"Version": 1, "AccessKeyId": "K%s", "SecretAccessKey": "s"}' "$id"
"""


@pytest.mark.parametrize(
    "command",
    [
        'sh {script} plain \'single $HOME\' "double $HOME" "a\\"b\\c\\\\d" e\\ f \'\' #g',
        "sh {script} a; sh {script} b",
        *(
            pytest.param(command, marks=pytest.mark.matrix)
            for command in (
                "sh {script} $HOME ${{HOME}} $(echo x) `echo y` * ~ ~/z",
                "sh {script} a | cat",
                "sh {script} a && sh {script} b",
                "sh {script} a > {script}.out 2>&1 &",
                "sh {script} it\\'s 'a'\"b\"c  \t d",
                "NAME=value sh {script} a",
                "sh {script} 'open",
                "sh {script} open\\",
                "'sh' '{script}' \"it's\" 'a\\b'",
                "~/no-shell",
                "if true; then sh {script}; fi",
            )
        ),
    ],
)
def test_a_credential_process_has_no_shell_and_the_words_of_botocore(signers, tmp_path, command):
    (tmp_path / "arguments").write_text(ARGUMENTS)
    command = command.format(script=tmp_path / "arguments")
    botocore, *ours = signers(Source(config={"default": {"credential_process": command}}))
    assert ours == [botocore, botocore]


def test_an_empty_token_of_a_credential_process_is_not_sent(signers):
    printed = '{"Version": 1, "AccessKeyId": "PERMANENT", "SecretAccessKey": "s", "SessionToken": ""}'
    source = Source(config={"default": {"credential_process": f"printf %s '{printed}'"}})
    assert signers(source) == ("PERMANENT",) * 3


def test_a_credential_process_gets_no_input(environment, endpoint):
    with environment(Source(config={"default": {"credential_process": "sh -c 'cat; exit 3'"}})) as home:
        words = error_of(s3_config(endpoint_url=endpoint))
    assert f"profile default in {home}/.aws/config: credential_process" in words and "exit status: 3" in words


def test_an_expired_login_names_the_command(environment, endpoint):
    profile = {**identities.SSO, "sso_role_name": "r", "sso_start_url": "https://expired/start"}
    with environment(Source({"AWS_PROFILE": "my login"}, config={'profile "my login"': profile})):
        words = error_of(s3_config(endpoint_url=endpoint))
    assert "profile my login in " in words and "SSO, role r of account 123456789012" in words
    assert "`aws sso login --profile 'my login'`" in words


@pytest.mark.parametrize("text", ["[default", "[default]\naws_secret_access_key", "[a]\n[a]", "x = y"])
def test_a_file_that_is_not_valid_is_named_with_its_line_and_without_its_text(environment, endpoint, text):
    with environment(Source()) as home:
        (home / ".aws" / "config").write_text(text.replace("aws_secret", SECRET))
        words = error_of(s3_config(endpoint_url=endpoint))
    assert f"no credentials: {home}/.aws/config: line " in words


def test_paths_of_files_have_a_home_and_variables(environment, endpoint, monkeypatch):
    files = {"AWS_CONFIG_FILE": "~/$FOLDER/own config", "AWS_SHARED_CREDENTIALS_FILE": "${FOLDER_PATH}/own"}
    with environment(Source({"FOLDER": "sub", "AWS_PROFILE": "p", "AWS_CA_BUNDLE": "", **files})) as home:
        monkeypatch.setenv("FOLDER_PATH", str(home / "sub"))
        (home / "sub").mkdir()
        (home / "sub" / "own config").write_text("[profile p]\nregion = us-east-1\n")
        (home / "sub" / "own").write_text(f"[p]\naws_access_key_id: OWN\naws_secret_access_key: {SECRET}\n")
        assert identities.signer_of_botocore({}) == identities.signer({}, endpoint) == "OWN"


#: Where a CA is configured, in the order in which it applies.
CA = ("ca_bundle=", "AWS_CA_BUNDLE", "ca_bundle of the profile", "REQUESTS_CA_BUNDLE")


@pytest.fixture(scope="module")
def tls_server(tmp_path_factory):
    certificates = make_certificates(tmp_path_factory.mktemp("tls"), "localhost")
    with identities.serving(certificates.server_context()) as started:
        yield f"https://127.0.0.1:{started.server_port}", certificates.ca_file


@pytest.mark.parametrize("force_sdk", [False, True])
def test_of_two_ca_bundles_the_first_is_trusted(environment, tls_server, tmp_path, force_sdk):
    endpoint, right = tls_server
    wrong = make_certificates(tmp_path, "localhost").ca_file
    trusted = {}
    for position, first in enumerate(CA):
        for second in CA[position + 1 :]:
            for bundles in ({first: right, second: wrong}, {first: wrong, second: right}):
                environ = {name: str(path) for name, path in bundles.items() if name.isupper()}
                profile = {"ca_bundle": str(bundles[CA[2]])} if CA[2] in bundles else {}
                source = Source(
                    {"AWS_PROFILE": "my ca", **environ}, config={"profile 'my ca'": {**profile, **keys("K")}}
                )
                config = s3_config(
                    endpoint_url=endpoint, ca_bundle=bundles.get(CA[0]), max_attempts=1, force_sdk=force_sdk
                )
                with environment(source):
                    try:
                        trusted[first, second, bundles[first] is right] = (
                            torchobj.Store("s3://b", config=config).get("k") == b"K"
                        )
                    except exceptions.StoreError:
                        trusted[first, second, bundles[first] is right] = False
    assert trusted == {case: case[2] for case in trusted} and len(trusted) == 12
