#!/usr/bin/env bash
# Runs the native tests of the kernels at the AVX-512 levels, or those in LEVELS, in Bochs, an emulator of a whole
# machine. The processor need not have these levels. Takes about eight minutes a level. At avx512_bf16 only the
# tests of packing pass: Bochs 3.0 converts half of the numbers wrongly in VCVTNE2PS2BF16.
# BOCHS names the emulator (3.0 or newer), KERNEL a Linux kernel of x86-64 with the serial console built in.
set -euo pipefail
cd "$(dirname "$0")/../.."

levels=${LEVELS:-avx512 avx512_vnni}
bochs=${BOCHS:-bochs}
kernel=${KERNEL:-$(ls -t /boot/vmlinuz-* 2> /dev/null | head -1 || true)}
isolinux=/usr/lib/ISOLINUX/isolinux.bin
loader=/usr/lib/syslinux/modules/bios/ldlinux.c32
roms=${BXSHARE:-/usr/share/bochs}
build=build/emulate

need() { # COMMAND-OR-FILE PACKAGE
  command -v "$1" > /dev/null || [ -e "$1" ] || {
    echo "make emulate needs $1, found none; try: apt-get install $2" >&2
    exit 1
  }
}
need "$bochs" "bochs (of Debian 13, or newer)"
need "${kernel:-a kernel in KERNEL}" "linux-image-cloud-amd64"
need busybox busybox-static
need cpio cpio
need xorriso xorriso
need "$isolinux" isolinux
need "$loader" syslinux-common

generator=()
command -v ninja > /dev/null && generator=(-G Ninja)
cmake -S csrc/tests -B "$build" "${generator[@]}" -DCMAKE_CXX_FLAGS="-O3 -march=x86-64" > /dev/null
targets=()
for level in $levels; do targets+=("octavo_$level"); done
cmake --build "$build" --target native_tests "${targets[@]}" --parallel > /dev/null

# The machine's files: busybox, the tests, the kernels and the libraries that they need.
root=$build/root
rm -rf "$root" "$build/disc" "$build/console.log"
mkdir -p "$root"/{bin,proc,tmp,kernels} "$build/disc"
cp "$(command -v busybox)" "$build/native_tests" "$root/bin/"
ln -s busybox "$root/bin/sh"
for level in $levels; do cp "$build/liboctavo_$level.so" "$root/kernels/"; done
for library in $(ldd "$build/native_tests" | grep -o '/[^ ]*'); do
  mkdir -p "$root$(dirname "$library")"
  cp -L "$library" "$root$library"
done
cat > "$root/init" << END
#!/bin/sh
busybox mount -t proc proc /proc
native_tests --kernels /kernels $levels
echo "exit status: \$?"
busybox sleep 2
busybox reboot -f
END
chmod +x "$root/init"
(cd "$root" && find . | cpio --quiet -o -H newc | gzip -1) > "$build/disc/initrd.gz"

# Bochs fails in the system management mode that ACPI is switched on in. A triple fault ends it.
cat > "$build/disc/isolinux.cfg" << END
DEFAULT tests
LABEL tests
 KERNEL vmlinuz
 INITRD initrd.gz
 APPEND console=ttyS0,115200 quiet acpi=off mitigations=off lsm=capability tsc=reliable reboot=triple panic=-1
END
cp "$kernel" "$build/disc/vmlinuz"
cp "$isolinux" "$loader" "$build/disc/"
xorriso -as mkisofs -quiet -b isolinux.bin -c boot.cat -no-emul-boot -boot-load-size 4 -boot-info-table \
  -o "$build/disc.iso" "$build/disc" 2> /dev/null

# Linux starts on Bochs's Skylake, but not on its later processors. Instructions added to it run, though CPUID does
# not name them.
cat > "$build/bochsrc" << END
display_library: rfb, options="timeout=0"
romimage: file=$roms/BIOS-bochs-latest
vgaromimage: file=$roms/VGABIOS-lgpl-latest
memory: guest=512, host=512
cpu: model=corei7_skylake_x, add_features="avx_vnni avx512vnni avx512bf16", ips=100000000, reset_on_triple_fault=0
clock: sync=none
ata0-master: type=cdrom, path=disc.iso, status=inserted
boot: cdrom
com1: enabled=1, mode=file, dev=console.log
log: bochs.log
panic: action=fatal
error: action=ignore
info: action=ignore
END
echo c > "$build/commands"
(cd "$build" && "$bochs" -q -f bochsrc -rc commands < /dev/null > bochs.out 2>&1) || true
tr -d '\r' < "$build/console.log"
grep -q '^exit status: 0' "$build/console.log" || {
  echo "the tests failed, or the machine did not start; see $build/console.log and $build/bochs.log" >&2
  exit 1
}
