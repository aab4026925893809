"""`batchdecode completion`: the script that lets a shell complete commands, options and values."""

from dataclasses import dataclass
from typing import Literal

from ..help import REQUIRED, argument
from ..options import as_command

EXAMPLES = (
    'eval "$(batchdecode completion bash)"',
    'eval "$(batchdecode completion zsh)"',
    "batchdecode completion fish | source",
)
NOTES = ("To use it, put the line for your shell into its start-up file.",)

# Each asks `batchdecode` through COMPLETION_VARIABLE; usage/completing.py says what it answers.
_BASH = r"""
_batchdecode_complete() {
  local line word=${COMP_WORDS[COMP_CWORD]}
  [[ $word == [:=] ]] && word=
  COMPREPLY=()
  while IFS= read -r line; do
    case $line in
      =*) line=${line#=}; COMPREPLY+=("$(printf %q "${line%%$'\t'*}")") ;;
      \**)
        compopt -o filenames 2> /dev/null
        while IFS= read -r line; do COMPREPLY+=("$line"); done < <(
          compgen -d -- "$word"
          compgen -f -X "!${line#\*}" -- "$word"
        ) ;;
    esac
  done < <(_BATCHDECODE_COMPLETE=bash COMP_WORDBREAKS="$COMP_WORDBREAKS" \
    "$1" "$COMP_LINE" "$COMP_POINT" 2> /dev/null)
  if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[:=] ]]; then
    compopt -o nospace 2> /dev/null
  fi
}
complete -F _batchdecode_complete batchdecode
"""
# Whoever has called compinit keeps what it set up; for others it is called before the first prompt
# after this, since a later call would forget what was said to it before.
_ZSH = r"""
_batchdecode_complete() {
  local line word
  local -a described bare open
  for line in "${(@f)$(_BATCHDECODE_COMPLETE=zsh "${words[1]}" $((CURRENT - 2)) \
      "${(@Q)words[2,-1]}" 2> /dev/null)}"; do
    word=${${line#\=}%%$'\t'*}
    case $line in
      (\=*[:=]$'\t'*) open+=("$word") ;;
      (\=*$'\t') bare+=("$word") ;;
      (\=*) described+=("${word//:/\\:}:${line#*$'\t'}") ;;
      (\*) _files -/ ;;
      (\**) _files -g "${line#\*}" ;;
    esac
  done
  (( $#described )) && _describe -V batchdecode described
  (( $#bare )) && compadd -a bare
  (( $#open )) && compadd -S '' -a open
  return 0
}
_batchdecode_set_up() {
  if (( ! $+functions[compdef] )); then autoload -Uz compinit && compinit -i; fi
  compdef _batchdecode_complete batchdecode
  precmd_functions=(${precmd_functions:#_batchdecode_set_up})
}
if (( $+functions[compdef] )); then _batchdecode_set_up
else precmd_functions+=(_batchdecode_set_up); fi
"""
_FISH = r"""
function __batchdecode_complete
  set -l before (commandline -opc)
  set -l word (commandline -ct)
  set -l all (commandline -op)
  set -l next (math (count $before) + 1)
  test -n "$word"; and set next (math $next + 1)
  for line in (env _BATCHDECODE_COMPLETE=fish $before[1] (math (count $before) - 1) \
      $before[2..] "$word" $all[$next..] 2> /dev/null)
    switch $line
      case '=*'
        string sub -s 2 -- $line
      case '*'
        for file in (__fish_complete_path "$word")
          string match -q -- '*/' $file
          or string match -q -- (string sub -s 2 -- $line) (string split \t -- $file)[1]
          and echo $file
        end
    end
  end
end
complete -c batchdecode -f -k -a '(__batchdecode_complete)'
"""
_SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


@dataclass(frozen=True, kw_only=True)
class CompletionOptions:
    """The options of `batchdecode completion`."""

    shell: Literal["bash", "zsh", "fish"] = argument("bash, zsh or fish.", "SHELL", REQUIRED)


def completion(options: CompletionOptions) -> None:
    """Print the script that lets a shell complete commands, options and their values."""
    from ..printing import print_text  # noqa: PLC0415 - --help starts without it

    print_text(_SCRIPTS[options.shell].lstrip())


COMMAND = as_command(completion, CompletionOptions, examples=EXAMPLES, notes=NOTES)
