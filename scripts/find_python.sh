#!/usr/bin/env bash
# Sourced by the scripts that start Python:
#
#   find_python ROOT MODULE   the interpreter goes to $python; it can import MODULE of the package,
#                             which is in the folder ROOT
#
#   PYTHON   the interpreter; the repository's .venv, else python3, by default
#
# Where there is none that can: one sentence and exit status 2.

fail() {
  echo "$(basename "$0"): $1" >&2
  exit 2
}

find_python() {
  local root="$1" module="$2"
  python="${PYTHON:-}"
  if [[ -z $python ]]; then
    python=python3
    if [[ -x $root/.venv/bin/python ]]; then
      python="$root/.venv/bin/python"
    fi
  fi
  command -v "$python" >/dev/null 2>&1 ||
    fail "there is no Python at '$python': install Python 3.11 or newer, or set PYTHON"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 ||
    fail "'$python' is no Python 3.11 or newer: set PYTHON to one"
  "$python" -c "import $module" >/dev/null 2>&1 ||
    fail "'$python' lacks the package: run $python -m pip install -e '$root'"
}
