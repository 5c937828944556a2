#!/usr/bin/env bash
# Installs NVIDIA's Triton Inference Server without docker into build/triton, or $PASS_TRITON: from
# NVIDIA's pytriton wheel, with an environment for models (numpy 1, for which its Python backend was
# compiled), and the client that the tests use.
#
#     scripts/install_triton.sh      # needs Python 3.11 or 3.12: PYTHON=/path/to/python3.12
#     build/triton/tritonserver --model-repository REPOSITORY
set -euo pipefail
cd "$(dirname "$0")/.."
server_version=0.7.0 # of nvidia-pytriton: tritonserver 2.51.0
client=(tritonclient==2.73.0 grpcio==1.85.1 python-rapidjson==1.25)
python=${PYTHON:-python3}

fail() {
    echo "error: $*" >&2
    exit 2
}

version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') || fail "cannot run $python; set PYTHON"
case $version in
3.11 | 3.12) ;;
*) fail "Triton's Python backend is for Python 3.11 or 3.12 here, not $version; name one: PYTHON=... $0" ;;
esac
[ "$(uname -sm)" = "Linux x86_64" ] || fail "the wheel is for Linux on x86-64, not $(uname -sm)"

into=${PASS_TRITON:-build/triton}
mkdir -p "$into"
into=$(cd "$into" && pwd)
exec 9>"$into/lock"
flock 9 # of two calls at once, one installs and the other waits

stamp="$("$python" -c 'import sys; print(sys.version)') $PWD $into $(cat "$0" pyproject.toml constraints.txt | cksum)"
if [ "$(cat "$into/stamp" 2>/dev/null)" = "$stamp" ]; then
    echo "Triton is installed in $into" >&2
    exit 0
fi
rm -rf "$into"/{stamp,server,backends,lib,venv,client}
# pip_install PYTHON ARGUMENT...
pip_install() { "$1" -m pip install --quiet --disable-pip-version-check "${@:2}"; }

echo "installing tritonserver (nvidia-pytriton $server_version) into $into/server" >&2
pip_install "$python" --no-deps --target "$into/server" "nvidia-pytriton==$server_version"
triton=$into/server/pytriton/tritonserver
mkdir -p "$into/backends/python" "$into/lib"
cp -r "$triton/backends/python/." "$triton/python_backend_stubs/$version/triton_python_backend_stub" "$into/backends/python/"
chmod +x "$triton/bin/tritonserver" "$into/backends/python/triton_python_backend_stub"

# The stub of the Python backend is linked with libpython, which many installations lack.
library=libpython$version.so.1.0
home=$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("LIBDIR"))')
for directory in "$home" /usr/lib/x86_64-linux-gnu /usr/lib64; do
    [ -e "$directory/$library" ] && ln -sf "$directory/$library" "$into/lib/$library" && break
done
if [ ! -e "$into/lib/$library" ]; then
    echo "fetching $library with apt-get" >&2
    (cd "$into/lib" && apt-get download -qq "libpython$version" >&2 && dpkg -x libpython"$version"_*.deb . &&
        ln -sf usr/lib/x86_64-linux-gnu/"$library" "$library") ||
        fail "no $library here; install the package libpython$version, or name a Python that has it: PYTHON=... $0"
fi

echo "installing an environment for models into $into/venv" >&2
"$python" -m venv "$into/venv"
grep -v '^numpy==' constraints.txt >"$into/constraints.txt"
pip_install "$into/venv/bin/python" --constraint "$into/constraints.txt" 'numpy>=1.26,<2' --editable '.[cpu]'
echo "installing ${client[0]} into $into/client" >&2
pip_install "$python" --no-deps --target "$into/client" "${client[@]}"

cat >"$into/tritonserver" <<END
#!/usr/bin/env bash
# Written by scripts/install_triton.sh. Takes the flags of tritonserver.
export LD_LIBRARY_PATH="$into/server/nvidia_pytriton.libs:$into/lib\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}"
export PATH="$into/venv/bin:\$PATH" VIRTUAL_ENV="$into/venv"
exec "$triton/bin/tritonserver" --backend-directory="$into/backends" "\$@"
END
chmod +x "$into/tritonserver"
echo "$stamp" >"$into/stamp"
echo "Triton is installed in $into; start it with $into/tritonserver --model-repository REPOSITORY" >&2
