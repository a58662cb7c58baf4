# Sourced by the other scripts: a virtual environment in .venv with the pack's dependencies. Sets $PYTHON to its python.
# Where there is no NVIDIA GPU a pinned torch goes in first: an open range would pull the CUDA libraries.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${PARALLEL_DIT_VENV:-$root/.venv}

if [ ! -x "$venv/bin/python" ]; then
    base=${PYTHON:-python3}
    "$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        echo "Python 3.11 or newer is needed; $base is $("$base" --version). Set PYTHON to another one." >&2
        exit 1
    }
    echo "== setting up $venv (once)"
    "$base" -m venv "$venv"
fi
PYTHON="$venv/bin/python"
# pip's failure ends the script (pipefail); grep's, which has nothing to show where all went well, does not.
install() { "$PYTHON" -m pip install --quiet --disable-pip-version-check "$@" 2>&1 | { grep -v '^WARNING: Location' || true; }; }
# Installs what the pack and the given extras of pyproject.toml require and this environment lacks; with --constrained in front,
# at the versions of constraints.txt.
provide() {
    local lacking
    lacking=$("$PYTHON" "$root/scripts/requirements.py" "$@")
    [ -z "$lacking" ] && return
    echo "== installing" $lacking
    install $lacking
}
# Installs each editor of frontends.txt into a folder of its own, since ComfyUI has one too.
provide_frontends() {
    local line place
    while read -r line; do
        place="$venv/frontends/${line#*==}"
        [ -d "$place" ] && continue
        echo "== installing $line"
        install --no-deps --target "$place" "$line"
    done < <(grep -v '^#' "$root/frontends.txt")
}

# Torch is the largest download: in a terminal pip shows how far it is.
install_torch() {
    echo "== downloading and installing $1: about 200 MB for the CPU alone, several GB if the package index gives CUDA's libraries with it"
    if [ -t 1 ]; then "$PYTHON" -m pip install --disable-pip-version-check "$1"; else install "$1"; fi
}
if ! "$PYTHON" -c 'import torch' 2>/dev/null; then
    if command -v nvidia-smi >/dev/null 2>&1; then install_torch 'torch>=2.6'; else install_torch 'torch==2.13.0'; fi
    "$PYTHON" -W ignore::UserWarning -c 'import torch'  # numpy, which torch misses here, comes next
fi
