#!/usr/bin/env bash
# Installs the newest releases of what streambp stands on into an environment of its own, whatever upper bounds
# pyproject.toml has, and runs the fast tier and the table of families there. The weekly workflow and a release call it.
#
#   bash scripts/newest_releases.sh [FOLDER]     FOLDER gets the environment and families.md; .newest if none is named
#
# PYTHON=... names an interpreter. WITH="transformers==5.24.0 torch==2.14.*" asks for these releases in place of the newest.
# PYTEST="tests/layer -x" runs these tests alone, and no table.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=${1:-.newest}
python=$folder/venv/bin/python

if [ ! -x "$python" ]; then
  "${PYTHON:-python3}" -m venv "$folder/venv"
fi

# What tests need, by name and marker, without versions.
wanted=()
while IFS= read -r line; do
  wanted+=("$line")
done < <("$python" - <<'EOF'
import re
from pathlib import Path

text = Path("pyproject.toml").read_text("utf-8")
lines = re.search(r"^test = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)[1]
for requirement in re.findall(r'"([^"]+)"', lines):
    name, _, marker = requirement.partition(";")
    extra = re.match(r"streambp-hf\[(\w+)\]", name)
    name = extra[1] if extra else re.split(r"[<>=~! ]", name)[0]
    print(f"{name}; {marker.strip()}" if marker else name)
EOF
)

install() {
  "$python" -m pip install --quiet --disable-pip-version-check --no-compile "$@"
}
install --upgrade --upgrade-strategy eager "${wanted[@]}"
if [ -n "${WITH:-}" ]; then
  read -r -a asked <<<"$WITH"
  install "${asked[@]}"
fi
# Too heavy for each change's tests, with SciPy and scikit-learn. It must not hold the others back from their newest releases.
install --upgrade --no-deps sentence-transformers
install scikit-learn
install --no-deps -e .
"$python" -m streambp env

if [ -n "${PYTEST:-}" ]; then
  read -r -a tests <<<"$PYTEST"
  exec "$python" -m pytest "${tests[@]}"
fi
"$python" -m pytest -n 2
"$python" -m pytest -n 2 -m "" tests/model/test_families.py
"$python" -m scripts.family_table "$folder/families.md"
