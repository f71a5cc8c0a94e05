"""`torchobj completion`: completes the words of a shell. `targets` lists the keys that are offered.

A key is data of the writer of the object, and must stay one word of the command. For bash, this module quotes it as the
quotes before the cursor require; zsh and fish quote what they insert. Keys have a type of their own, which the scripts
of click ignore.

bash replaces the text after the last of `COMP_WORDBREAKS`, such as the colon of `s3://`, or after an open quote.
"""

import os
import re
from typing import ClassVar, NamedTuple

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ShellComplete,
    ZshComplete,
    add_completion_class,
)

from torchobj.cli.options import Command
from torchobj.cli.output import print_line

#: Type of the completions that are keys or buckets.
KEY = "key"

#: Quoted with a backslash outside of quotes. Letters of all alphabets are not special.
_SPECIAL = re.compile(r"[^\w./:@%+=,-]")

#: A variable that is set for the command.
_ASSIGNMENT = re.compile(r"\w+=")

# bash passes the line up to the cursor, and the text that it replaces. It inserts the lines of the answer as they are.
_BASH = """\
%(complete_func)s() {
    local type value line=${COMP_LINE:0:COMP_POINT}
    COMPREPLY=()
    while IFS=, read -r type value; do
        case $type in
            dir) compopt -o dirnames ;;
            file) compopt -o default ;;
            key|plain) COMPREPLY+=("$value") ;;
        esac
    done < <(env COMP_WORDS="${line:-${COMP_WORDS[*]}}" COMP_CWORD="${2-${COMP_WORDS[COMP_CWORD]}}" \
%(complete_var)s=bash_complete "$1" 2>/dev/null)
    if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == */ ]]; then
        compopt -o nospace
    fi
}
complete -o nosort -F %(complete_func)s %(prog_name)s
"""

_ZSH = """\
#compdef %(prog_name)s
%(complete_func)s() {
    local -a names described keys folders
    local type value text
    (( $+commands[%(prog_name)s] )) || return 1
    for type value text in "${(@f)$(env COMP_WORDS="${(F)words[1,CURRENT]}" \
%(complete_var)s=zsh_complete %(prog_name)s 2>/dev/null)}"; do
        case $type in
            dir) _path_files -/ ;;
            file) _path_files -f ;;
            key) if [[ $value == */ ]]; then folders+=("$value"); else keys+=("$value"); fi ;;
            plain) if [[ $text == _ ]]; then names+=("$value"); else described+=("$value:$text"); fi ;;
        esac
    done
    (( $#described )) && _describe -V unsorted described -U
    (( $#names )) && compadd -U -V unsorted -a names
    (( $#folders )) && compadd -U -V unsorted -S '' -a folders
    (( $#keys )) && compadd -U -V unsorted -a keys
    return 0
}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    %(complete_func)s "$@"
else
    compdef %(complete_func)s %(prog_name)s
fi
"""

_FISH = """\
function %(complete_func)s
    set -l line (commandline -cp | string collect)
    for item in (env COMP_WORDS="$line" %(complete_var)s=fish_complete %(prog_name)s 2>/dev/null)
        set -l found (string split -m 1 , -- $item)
        switch $found[1]
            case dir
                __fish_complete_directories $found[2]
            case file
                __fish_complete_path $found[2]
            case key plain
                printf '%%s\\n' $found[2]
        end
    end
end
complete --no-files --command %(prog_name)s --arguments '(%(complete_func)s)'
"""


class _Word(NamedTuple):
    """A word of a command line."""

    text: str
    """The word without its quotes."""
    starts: list[int]
    """Where each character of `text` starts in the line."""
    quote: str
    """The quote that is open at its end: empty, `'`, `"`, or `$'`."""


def _words(line: str, *, escapes_in_single: bool = False) -> list[_Word]:
    r"""The words of a line, of which the last is being typed; it is empty after a space.

    Args:
        line: The line up to the cursor.
        escapes_in_single: Whether `\'` and `\\` are characters within single quotes, as in fish.

    Example:
        >>> [(word.text, word.quote) for word in _words('ls a\\ b "c d')]
        [('ls', ''), ('a b', ''), ('c d', '"')]
    """
    words, text, starts, quote, begun, at = [], "", list[int](), "", False, 0
    while at < len(line):
        char, follows, start = line[at], line[at + 1 : at + 2], at
        at += 1
        if quote == "" and char.isspace():
            if begun:
                words.append(_Word(text, starts, ""))
            text, starts, begun = "", [], False
            continue
        begun = True
        if char == quote[-1:]:
            quote = ""
            continue
        if quote == "" and char in "'\"":
            is_ansi = char == "'" and text.endswith("$") and line[start - 1] == "$"
            quote = "$'" if is_ansi else char
            continue
        if char == "\\" and _is_escape(quote, follows, escapes_in_single=escapes_in_single):
            char, at = follows, at + 1
        text += char
        starts += [start] * len(char)
    return [*words, _Word(text, starts, quote)]


def _is_escape(quote: str, follows: str, *, escapes_in_single: bool) -> bool:
    """Whether a backslash quotes the character that follows it."""
    if quote == "'":
        return escapes_in_single and follows in ("'", "\\")
    return quote != '"' or follows in ('"', "\\", "$", "`", "\n")


def _quoted(text: str, quote: str) -> str | None:
    r"""A text as bash reads it after the open `quote`; None if readline would take its first quote for that one.

    readline closes the quote if the text does not end with one, so that a text that does must be closed.

    Example:
        >>> print(_quoted("a b$c!", ""), _quoted("a!b$c", '"'), _quoted("it's", "'"), _quoted("it'", "'"))
        a\ b\$c\! a"\!"b\$c it'\''s it'\'
    """
    if quote == "":
        return _SPECIAL.sub(r"\\\g<0>", text)
    if quote == "'":
        quoted = text.replace("'", r"'\''")
        quoted = quoted[:-1] if text.endswith("'") else quoted
    else:
        # No backslash protects an exclamation mark from the history within double quotes.
        quoted = re.sub(r'["\\$`]', r"\\\g<0>", text).replace("!", r'"\!"')
        if text.endswith('"'):
            quoted = f'{quoted[:-2]}"\\"'
        elif text.endswith("!"):
            quoted += '"'
    return None if quoted.startswith(quote) else quoted


class _Shell(ShellComplete):
    """Takes the words from the line, and completes the values of `--option=value` as the shell replaces them."""

    escapes_in_single: ClassVar[bool] = False
    _word = _Word("", [], "")

    def get_completion_args(self) -> tuple[list[str], str]:
        """The words before the one that is completed, and that one."""
        words = _words(os.environ["COMP_WORDS"], escapes_in_single=self.escapes_in_single)
        while len(words) > 1 and _ASSIGNMENT.match(words[0].text):
            del words[0]
        self._word = words[-1]
        return [word.text for word in words[1:-1]], self._word.text

    def format_completion(self, item: CompletionItem[str]) -> str:
        """An item for the script of the shell, with what the shell inserts."""
        if item.type not in (KEY, "plain"):
            return super().format_completion(item)
        inserted = self.inserted(item.value)
        if inserted is None:
            return "" if item.type == KEY else super().format_completion(item)
        return super().format_completion(CompletionItem(inserted, item.type, item.help))

    def inserted(self, value: str) -> str | None:
        """What the shell inserts for a value; None if that is not possible."""
        option = re.match(r"--[\w-]+=", self._word.text)
        return f"{option[0] if option else ''}{value}"


class _Bash(_Shell, BashComplete):
    source_template = _BASH

    def inserted(self, value: str) -> str | None:
        """The part of the value that replaces the text before the cursor, quoted."""
        line, replaced = os.environ["COMP_WORDS"], os.environ["COMP_CWORD"]
        word, whole = self._word, super().inserted(value) or ""
        kept = "".join(
            char for char, start in zip(word.text, word.starts, strict=True) if start < len(line) - len(replaced)
        )
        if not line.endswith(replaced) or not whole.startswith(kept) or word.quote == "$'":
            return None
        return _quoted(whole.removeprefix(kept), word.quote)


class _Zsh(_Shell, ZshComplete):
    source_template = _ZSH


class _Fish(_Shell, FishComplete):
    source_template = _FISH
    escapes_in_single = True


_SHELLS: dict[str, type[ShellComplete]] = {"bash": _Bash, "zsh": _Zsh, "fish": _Fish}


def register() -> None:
    """Makes click answer the scripts by this module."""
    for shell in _SHELLS.values():
        add_completion_class(shell)


@click.command(cls=Command, short_help="Print the completion script of a shell.")
@click.argument("shell", type=click.Choice(list(_SHELLS)))
def completion(shell: str) -> None:
    """Prints the script that makes SHELL complete commands, options, local files and keys of buckets.

    For bash, add `eval "$(torchobj completion bash)"` to ~/.bashrc; likewise for zsh. For fish, write it to
    ~/.config/fish/completions/torchobj.fish.
    """
    root = click.get_current_context().find_root().command
    print_line(_SHELLS[shell](root, {}, "torchobj", "_TORCHOBJ_COMPLETE").source())
