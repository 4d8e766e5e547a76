#!/bin/sh
# Runs the tests of the kernels for 64-bit Arm under qemu's user-mode emulation, once per kind of
# processor. What is missing here (a Rust with that target, a C library to link with, qemu) is unpacked
# from the distribution's packages into models/cache/aarch64; nothing is installed. Where that cannot
# be had either, it says so on a line that starts with SKIPPED, and ends well.
set -eu
cd "$(dirname "$0")/.."
target=aarch64-unknown-linux-gnu
cache=$PWD/models/cache/aarch64
root=$cache/root
mkdir -p "$root"

skip() {
    echo "SKIPPED kernels for $target under emulation: $1"
    exit 0
}

# apt with lists of its own: the system's need not know packages for Arm.
apt() {
    command=$1
    shift
    "$command" -o Dir::State="$cache/apt" -o Dir::State::status="$cache/apt/status" -o Dir::Cache="$cache/apt" \
        -o APT::Architectures::=amd64 -o APT::Architectures::=arm64 -o APT::Sandbox::User=root \
        -o Acquire::Languages=none "$@"
}

# Downloads packages and unpacks them.
unpack() {
    (cd "$cache/apt/archives" && apt apt-get -qq download "$@" && for deb in ./*.deb; do
        dpkg-deb -x "$deb" "$root" && rm "$deb"
    done)
}

# Prints the packages that package $1 depends on and whose names match $2.
needs() {
    apt apt-cache show "$1" | sed -n '/^Depends:/{s/^Depends: //;p;q}' | tr ',' '\n' | sed 's/^ *//; s/ .*//' |
        grep -E "$2" || true
}

# An ordinary toolchain with the target, or the distribution's.
has_target() { [ -d "$(rustc --print target-libdir --target $target)" ]; }
tools=yes
has_target || [ -x "$cache/rustc" ] || tools=no
qemu=$(command -v qemu-aarch64-static || command -v qemu-aarch64 || echo "$root/usr/bin/qemu-aarch64-static")
[ -x "$qemu" ] || tools=no
[ -d "$root/usr/aarch64-linux-gnu" ] || tools=no

if [ $tools = no ]; then
    { command -v apt-get && command -v dpkg-deb; } > /dev/null || skip "no packages of Debian's kind here"
    [ "$(dpkg --print-architecture)" = amd64 ] || skip "only x86-64 machines know where the packages are"
    mkdir -p "$cache/apt/lists/partial" "$cache/apt/archives/partial"
    touch "$cache/apt/status"
    apt apt-get -qq update || skip "the lists of packages cannot be had"
    [ -d "$root/usr/aarch64-linux-gnu" ] || {
        gcc=$(needs gcc-aarch64-linux-gnu '^gcc-[0-9]+-aarch64-linux-gnu$' | sed 's/^gcc-\([0-9]*\)-.*/\1/')
        unpack libc6-dev-arm64-cross "libgcc-$gcc-dev-arm64-cross" || skip "no C library to link with"
    }
    [ -x "$qemu" ] || unpack qemu-user-static || skip "no qemu-user-static"
    has_target || {
        rust=rustc-web std=libstd-rust-web-dev
        apt apt-cache show $rust $std:arm64 > /dev/null 2>&1 || { rust=rustc std=libstd-rust-dev; }
        unpack $rust $std $std:arm64 $(needs $std '^libstd-rust') ||
            skip "no Rust for it: try rustup target add $target"
        # The compiler's own libraries, by what it links with.
        unpack $(needs "$(needs $std '^libstd-rust')" '^libllvm') || skip "no LLVM for the distribution's Rust"
        cat > "$cache/rustc" << END
#!/bin/sh
LD_LIBRARY_PATH=$root/usr/lib/x86_64-linux-gnu:$(dirname "$(find "$root/usr/lib" -name 'libLLVM*.so*' | head -1)")
export LD_LIBRARY_PATH
exec "$root/usr/bin/rustc" --sysroot "$root/usr" "\$@"
END
        chmod +x "$cache/rustc"
        # 1.x only.
        minor() { sed -n "s/^$1 *\"\{0,1\}1\.\([0-9]*\).*/\1/p"; }
        has=$("$cache/rustc" --version | minor rustc)
        least=$(minor "rust-version =" < Cargo.toml)
        [ "${has:-0}" -ge "$least" ] || { rm "$cache/rustc"; skip "the distribution's Rust is 1.$has, not 1.$least"; }
    }
fi

# The linker of the toolchain in use, and what a C compiler would tell it for a static program.
lld=$(find "$(rustc --print sysroot)/lib/rustlib" -name rust-lld | head -1)
[ -n "$lld" ] || lld=$(command -v ld.lld) || skip "neither rust-lld nor ld.lld"
c=$root/usr/aarch64-linux-gnu/lib
gcc=$(dirname "$(find "$root/usr/lib/gcc-cross" -name crtbeginT.o)")
cat > "$cache/ld" << END
#!/bin/sh
[ "\$1" != -flavor ] || shift 2
exec "$lld" $([ "${lld##*/}" != rust-lld ] || echo "-flavor gnu") -static "$c/crt1.o" "$c/crti.o" "$gcc/crtbeginT.o" \\
    -L "$c" -L "$gcc" "\$@" --start-group -lgcc -lgcc_eh -lc --end-group "$gcc/crtend.o" "$c/crtn.o"
END
chmod +x "$cache/ld"

has_target || export RUSTC="$cache/rustc"
export CARGO_TARGET_DIR="$PWD/target/$target" CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER="$cache/ld"
flags="-Clinker-flavor=ld.lld -Ctarget-feature=+crt-static -Crelocation-model=static"
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUSTFLAGS="$flags"
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="$qemu" QUERN_EMULATED=1

# A processor with both tables for Arm, one without i8mm, one without dot products either.
for cpu in "max neon-i8mm,neon,scalar" "neoverse-n1 neon,scalar" "cortex-a72 scalar"; do
    export QEMU_CPU="${cpu% *}" QUERN_TABLES="${cpu#* }"
    echo "== $target on $QEMU_CPU: $QUERN_TABLES"
    cargo test --quiet --release -p quern-kernels --target $target --test linear --test ops
done

# What attention computes in the lanes of this processor; how it is cut into pieces is tested elsewhere.
export QEMU_CPU=max
cargo test --quiet --release -p quern-kernels --target $target --test attend -- every_head units nan large cache
