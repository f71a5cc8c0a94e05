"""Completion of commands and keys, typed on terminals in real shells."""

import os
import pty
import select
import shlex
import shutil
import subprocess
import sys
import time

import pytest

from tests.support.command_line import LIMIT_S, ROOT

pytestmark = pytest.mark.providers("s3")

#: Each of them runs `touch pwned` in a shell that takes it as text of its own.
HOSTILE = (
    "$(touch$IFS$9pwned)",
    "`touch pwned`",
    "; touch pwned; #",
    "' ; touch pwned ; '",
    '" ; touch pwned ; "',
    "'\"`touch pwned`\"'$(touch pwned)",
    "\\'; touch pwned; \\\"; touch pwned; #",
    "&& touch pwned & touch pwned",
    "| touch pwned || touch pwned",
    " > pwned >> pwned",
    "<(touch pwned)>(touch pwned)",
    "$((a[$(touch pwned)]))${a[$(touch pwned)]}$[`touch pwned`]",
    "${(e):-`touch pwned`}(e:'touch pwned':)",
    "!!!touch!$!^touch^x",
    "a!b! c$d~e#f%g^h&i*j(k)l[m]n{o,p}q<r>s?t|u=v+w,x@y:z;",
    "\\",
    "-rf --yes",
    "ü ñ\u00a0é \u3000日本 😀",
    "$'\\x41' \\n \\t",
)

#: A line, or a command of the terminal, of its own where it is shown or read as it is.
CONTROL = ("\nplain,touch pwned", "\r\x1b[2Jtouch pwned\r", "\x03touch pwned", "\ttouch", "\u202etouch")

#: Each prompt is shown with its number, once the shell has set the terminal so that it reads keys.
_BEGIN = {
    "bash": "PROMPT_COMMAND='(( n += 1 ))'; PS1='<$n>'; set -o history; set -H; HISTFILE=\n{script}\n",
    "zsh": "setopt promptsubst; precmd() {{ (( n += 1 )) }}; PS1='<$n>'; autoload -Uz compinit; compinit -u -D\n{script}\n",
    "fish": (
        "function count_prompt --on-event fish_prompt; set -g n (math 0$n + 1); end\n"
        "function fish_prompt; printf '<%s>' $n; end\nfunction fish_greeting; end\n{script}\n"
    ),
}


#: Runs a program on the terminal of its standard input, as its controlling one.
_ON_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execvp(sys.argv[1], sys.argv[1:])"
)


class Terminal:
    """A shell on a terminal, in which `torchobj` completes, and otherwise notes its arguments."""

    def __init__(self, cli, folder, name):
        self._folder, self._name = folder / name, name
        (self._folder / "bin").mkdir(parents=True)
        program = self._folder / "bin" / "torchobj"
        program.write_text(
            f'#!/bin/sh\nif [ -n "$_TORCHOBJ_COMPLETE" ]; then exec {sys.executable} -m torchobj; fi\n'
            f'{{ for each; do printf "%s\\0" "$each"; done; printf "\\n\\0"; }} >> {self._folder}/arguments\n'
        )
        program.chmod(0o755)
        script = "\n".join(cli.lines("completion", name))
        begin = _BEGIN[name].format(script=script)
        (self._folder / ".zshrc").write_text(begin)
        (self._folder / "begin").write_text(begin)

    def typed(self, *lines):
        """Types lines, in which tabulators complete. Returns the arguments of each command that ran."""
        command = {
            "bash": ["bash", "--noprofile", "--rcfile", f"{self._folder}/begin", "-i"],
            "zsh": ["zsh", "-d", "-i"],
            "fish": ["fish", "--no-config", "-C", f"source {self._folder}/begin", "-i"],
        }[self._name]
        home = str(self._folder)
        environment = {"HOME": home, "ZDOTDIR": home, "XDG_CONFIG_HOME": home, "XDG_DATA_HOME": home, "TERM": "dumb"}
        environment |= {"PYTHONPATH": str(ROOT), "PATH": f"{home}/bin:{os.environ['PATH']}", "LC_ALL": "C.UTF-8"}
        ours, theirs = pty.openpty()
        with subprocess.Popen(
            [sys.executable, "-c", _ON_TERMINAL, *command],
            env=os.environ | environment,
            cwd=home,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        ) as process:
            os.close(theirs)
            try:
                self._type(ours, process, [*lines, "exit", "exit"])
            finally:
                process.kill()
                os.close(ours)
        noted = self._folder / "arguments"
        ran = noted.read_text(errors="surrogateescape").split("\n\0")[:-1] if noted.exists() else []
        noted.unlink(missing_ok=True)
        return [text.split("\0")[:-1] for text in ran]

    def _type(self, terminal, process, lines):
        """Writes each line at its prompt, and reads what the shell shows, until it ends."""
        self.shown, deadline, number, data = b"", time.monotonic() + LIMIT_S, 0, b""
        while process.poll() is None:
            assert time.monotonic() < deadline, self.shown[-4096:]
            if number < len(lines) and b"<%d>" % (number + 1) in self.shown:
                data += f"{lines[number]}\r".encode()
                number += 1
            reading, writing, _ = select.select([terminal], [terminal] if data else [], [], 0.05)
            if writing:
                data = data[os.write(terminal, data[:64]) :]
            if reading:
                deadline = time.monotonic() + LIMIT_S
                try:
                    self.shown += os.read(terminal, 65536)
                except OSError:
                    # Linux reports the end of a terminal as EIO.
                    process.wait(LIMIT_S)

    def executed(self):
        """Whether the text of a key ran as a command."""
        return (self._folder / "pwned").exists()


@pytest.fixture
def terminal(cli, tmp_path):
    def start(name):
        if shutil.which(name) is None:
            pytest.skip(f"{name} is not installed")
        return Terminal(cli, tmp_path, name)

    return start


@pytest.fixture
def completed(cli, monkeypatch):
    def complete(*words):
        with monkeypatch.context() as patch:
            patch.setenv("_TORCHOBJ_COMPLETE", "zsh_complete")
            patch.setenv("COMP_WORDS", shlex.join(["torchobj", *words]))
            patch.setenv("COMP_CWORD", str(len(words)))
            lines = cli.process().stdout.decode().splitlines()
        return [line for line in lines if "://" in line]

    return complete


@pytest.mark.providers("s3", "gs")
def test_keys_are_completed_level_by_level(bucket, completed):
    for key in ("train/0.jpg", "train/x/1.jpg", "val"):
        bucket.write(key, b"1")
    assert completed("ls", f"{bucket.url}/tr") == [f"{bucket.url}/train/"]
    assert len(completed("ls", f"{bucket.url}/train/")) == 2


@pytest.mark.parametrize(("key", "begun"), [("img[1].jpg", "img["), ("a*b", "a[*]"), ("q?", "q?"), ("{x,y}", "{")])
def test_a_key_with_wildcards_is_completed_as_a_pattern_that_matches_it_alone(cli, bucket, completed, key, begun):
    for each in (key, "img1.jpg", "aab", "qq", "x"):
        bucket.write(each, b"1")
    [url] = completed("ls", f"{bucket.url}/{begun}")
    [line] = cli.lines("ls", url)
    assert line.endswith(f" {key}")


def test_a_key_with_wildcards_is_completed_as_it_is_where_they_are_not_special(bucket, completed):
    bucket.write("img[1].jpg", b"1")
    for words in (["head"], ["ls", "--raw"]):
        assert completed(*words, f"{bucket.url}/im") == [f"{bucket.url}/img[1].jpg"]


def test_commands_are_completed(cli, monkeypatch):
    monkeypatch.setenv("_TORCHOBJ_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", "torchobj ch")
    monkeypatch.setenv("COMP_CWORD", "1")
    assert cli.process().stdout == b"plain,checkpoints\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_of_a_shell_is_printed(cli, shell):
    script = "\n".join(cli.lines("completion", shell))
    assert f"_TORCHOBJ_COMPLETE={shell}_complete" in script
    assert "Invalid value" in cli.run("completion", "tcsh").output


def test_bash_completes_commands_with_the_script(cli, tmp_path):
    program = tmp_path / "torchobj"
    program.write_text(f"#!/bin/sh\nexec {sys.executable} -m torchobj\n")
    program.chmod(0o755)
    script = "\n".join(cli.lines("completion", "bash"))
    line = f"COMP_WORDS=(torchobj ch); COMP_CWORD=1; _torchobj_completion {program}; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", f"{script}\n{line}"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "checkpoints\n"


#: Shells of the matrix, which CI installs.
OTHERS = [pytest.param(name, marks=pytest.mark.matrix) for name in ("zsh", "fish")]


@pytest.mark.parametrize("shell", ["bash", *OTHERS])
def test_urls_are_completed_unquoted_and_within_quotes(bucket, terminal, shell):
    for key in ("train/0.jpg", "train/x y/1=2.jpg", "val:a/k"):
        bucket.write(key, b"1")
    url = bucket.url
    # bash closes the quotes after a folder, too.
    double, single = ("", "") if shell == "bash" else ('"', "'")
    ran = terminal(shell).typed(
        f"torchobj ls {url}/tr\t0\t",
        f"torchobj ls {url}/train/x\t1\t",
        f'torchobj ls "{url}/train/x\t{double}',
        f"torchobj ls '{url}/tr\t{single}",
        f"torchobj ls {url}/val\tk\t",
        f"torchobj ls {url}/nothing\t",
        f"A=1 torchobj ls --json {url}/val\tk\t",
        "torchobj chec\t",
    )
    assert ran == [
        ["ls", f"{url}/train/0.jpg"],
        ["ls", f"{url}/train/x y/1=2.jpg"],
        ["ls", f"{url}/train/x y/"],
        ["ls", f"{url}/train/"],
        ["ls", f"{url}/val:a/k"],
        ["ls", f"{url}/nothing"],
        ["ls", "--json", f"{url}/val:a/k"],
        ["checkpoints"],
    ]


@pytest.mark.parametrize(
    ("shell", "keys"),
    [
        ("bash", [HOSTILE[5], *HOSTILE[13:15]]),
        *(pytest.param(name, HOSTILE, marks=pytest.mark.matrix) for name in ("bash", "zsh", "fish")),
    ],
    ids=lambda value: value if isinstance(value, str) else str(len(value)),
)
def test_a_key_that_is_completed_is_one_word_and_runs_no_command(bucket, terminal, shell, keys):
    for number, key in enumerate(keys):
        bucket.write(f"k{number}/{key}", b"1")
    started, arguments = terminal(shell), []
    for quote in ("", "'", '"'):
        lines = [f"torchobj head {quote}{bucket.url}/k{number}/\t" for number in range(len(keys))]
        arguments += started.typed(*lines)
    assert not started.executed()
    assert arguments == 3 * [["head", f"{bucket.url}/k{number}/{key}"] for number, key in enumerate(keys)]


@pytest.mark.parametrize("shell", ["bash", *OTHERS])
def test_the_common_start_of_several_keys_runs_no_command(bucket, terminal, shell):
    """Within quotes that the keys end, and after them: the folder is completed first."""
    folder = "k$(touch pwned)'\"`touch pwned`; touch pwned !x"
    for name in ("same$(touch pwned)1'", 'same$(touch pwned)2"', "same$(touch pwned)3!"):
        bucket.write(f"{folder}/{name}", b"1")
    started = terminal(shell)
    # The other shells complete no word that begins with quotes and goes on after them.
    quotes = ("", "'", '"') if shell == "bash" else ("",)
    ran = started.typed(*(f"torchobj head {quote}{bucket.url}/k\tsa\t1\t" for quote in quotes))
    assert not started.executed()
    assert ran == len(quotes) * [["head", f"{bucket.url}/{folder}/same$(touch pwned)1'"]]


def test_bash_completes_nothing_within_quotes_that_have_escapes(bucket, terminal):
    bucket.write("k\\'; touch pwned; #", b"1")
    started = terminal("bash")
    ran = started.typed(f"torchobj head $'{bucket.url}/k\t'", f"torchobj head {bucket.url}/k''\t", "torchobj head x")
    assert not started.executed() and ran[0] == ["head", f"{bucket.url}/k"] and ran[-1] == ["head", "x"]


@pytest.mark.parametrize("begun", ["!", "'"])
def test_bash_does_not_take_the_first_quote_of_a_key_for_the_one_that_is_open(bucket, terminal, begun):
    bucket.write(f"k/{begun}; touch pwned; #", b"1")
    quote = '"' if begun == "!" else "'"
    started = terminal("bash")
    started.typed(f"torchobj head {bucket.url}/k/{quote}\t{quote}")
    assert not started.executed()


def test_keys_with_control_characters_are_not_completed(bucket, completed):
    for number, key in enumerate(CONTROL):
        bucket.write(f"k{number}{key}", b"1")
    bucket.write("k", b"1")
    assert completed("ls", f"{bucket.url}/k") == [f"{bucket.url}/k"]


def test_buckets_are_completed(bucket, other_bucket, completed):
    assert f"{bucket.url}/" in completed("ls", bucket.url)
    assert {f"{bucket.url}/", f"{other_bucket.url}/"} <= set(completed("ls", "s3://"))
    assert completed("ls", f"{bucket.url}-missing") == []


@pytest.mark.providers("gs")
def test_a_url_is_completed_with_the_name_of_the_scheme_that_was_typed(bucket, completed, monkeypatch):
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "project")
    bucket.write("train/0", b"1")
    url = bucket.url.replace("gs://", "gcs://")
    assert completed("ls", f"{url}/tr") == [f"{url}/train/"] and f"{url}/" in completed("ls", url)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_of_click_insert_no_keys(cli, bucket, monkeypatch, shell):
    """They were printed by earlier versions, and quote nothing."""
    bucket.write("k$(touch pwned)", b"1")
    monkeypatch.setenv("_TORCHOBJ_COMPLETE", f"{shell}_complete")
    monkeypatch.setenv("COMP_WORDS", f"torchobj ls {bucket.url}/")
    monkeypatch.setenv("COMP_CWORD", "2")
    assert b"plain" not in cli.process().stdout


def test_a_command_in_a_message_has_the_url_as_one_word(cli, bucket):
    message = cli.error("head", f"{bucket.url}/$(touch pwned)/")
    assert f"`torchobj ls '{bucket.url}/$(touch pwned)/'`" in message
    bucket.write("k", b"1")
    url = f"{bucket.url}/$(touch pwned)"
    assert f"`torchobj doctor '{url}'`" in cli.error("head", url, "--no-sign-request")
