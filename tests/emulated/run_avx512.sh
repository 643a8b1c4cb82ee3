#!/usr/bin/env bash
# Runs a statically linked program in an emulated PC whose processor has AVX-512, and returns its exit code.
#
#   run_avx512.sh [-t SECONDS] [-e NAME=VALUE]... [-v] PROGRAM [ARGUMENT]...
#
#   -t SECONDS     wall-clock limit (600); when it is over, the script ends with 124
#   -e NAME=VALUE  an environment variable for the program; may be repeated
#   -v             show the guest's boot messages too
#
# The machine is Bochs (no hardware virtualisation needed) with a Debian kernel and an initramfs that holds the
# program. Everything comes from Debian packages, unpacked once, never installed, under $CASTIRON_EMULATOR_DIR
# (default ~/.cache/castiron/emulator). See README.md here.
set -euo pipefail

fail() {
  echo "run_avx512: $*" >&2
  exit 125
}

limit=600
verbose=0
environment=()
while getopts "t:e:v" option; do
  case $option in
    t) limit=$OPTARG ;;
    e) environment+=("$OPTARG") ;;
    v) verbose=1 ;;
    *) fail "unknown option; usage: run_avx512.sh [-t SECONDS] [-e NAME=VALUE]... [-v] PROGRAM [ARGUMENT]..." ;;
  esac
done
shift $((OPTIND - 1))
(($# > 0)) || fail "no program given; usage: run_avx512.sh [-t SECONDS] [-e NAME=VALUE]... [-v] PROGRAM [ARGUMENT]..."
program=$1
shift
[[ -x $program ]] || fail "$program is not an executable file"
if readelf -lW "$program" | grep -q INTERP; then
  fail "$program is dynamically linked and the guest has no libraries; link it with -static"
fi

cache=${CASTIRON_EMULATOR_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/castiron/emulator}
root=$cache/root
packages=(bochs bochs-term bochsbios vgabios isolinux syslinux-common xorriso busybox-static cpio)

# Downloads and unpacks the packages (about 45 MB), and whatever of their dependencies this system lacks.
fetch() {
  echo "run_avx512: unpacking the emulator into $cache (once)" >&2
  rm -rf "$cache/debs" "$root" "$root.part"
  mkdir -p "$cache/debs/partial" "$root.part"
  apt-get install -qq -y --no-install-recommends --download-only -o Dir::Cache::archives="$cache/debs/" \
    -o Debug::NoLocking=1 "${packages[@]}" >&2
  # apt leaves out what is installed already; those of our list are wanted here all the same
  local kernel
  kernel=$(apt-cache depends linux-image-cloud-amd64 | sed -n 's/.*Depends: \(linux-image-[^ ]*\)/\1/p' | head -1)
  (cd "$cache/debs" && apt-get download -qq "$kernel" "${packages[@]}" 2>&1 | grep -v unsandboxed >&2 || true)
  local deb
  for deb in "$cache"/debs/*.deb; do
    dpkg-deb -x "$deb" "$root.part"
  done
  compgen -G "$root.part/boot/vmlinuz-*" >/dev/null || fail "no kernel was downloaded; is apt-get update needed?"
  mv "$root.part" "$root"
}
[[ -d $root ]] || fetch

libraries=$root/usr/lib/x86_64-linux-gnu

work=$(mktemp -d "${TMPDIR:-/tmp}/castiron-emulated.XXXXXX")
emulator=
finish() {
  if [[ -n $emulator ]]; then
    kill -- "-$emulator" 2>/dev/null || true
    wait "$emulator" 2>/dev/null || true
  fi
  rm -rf "$work"
}
trap finish EXIT
trap 'exit 130' INT TERM

# The guest's first process: runs the program on the serial line, says how it ended, and waits for the end.
begin="--- castiron: program starts ---"
end="--- castiron: program ended with"
mkdir -p "$work"/initramfs/{bin,dev,proc,sys,tmp} "$work/iso"
cp "$root/bin/busybox" "$work/initramfs/bin/busybox"
cp "$program" "$work/initramfs/bin/program"
{
  echo '#!/bin/busybox sh'
  echo '/bin/busybox mount -t devtmpfs dev /dev'
  echo '/bin/busybox mount -t proc proc /proc'
  echo '/bin/busybox mount -t sysfs sys /sys'
  echo '/bin/busybox stty -F /dev/ttyS0 115200 raw -echo'
  echo 'exec </dev/null >/dev/ttyS0 2>&1'
  echo 'export HOME=/tmp TMPDIR=/tmp PATH=/bin'
  ((${#environment[@]} == 0)) || printf 'export %q\n' "${environment[@]}"
  echo 'cd /tmp'
  echo "echo '$begin'"
  printf '/bin/program'
  (($# == 0)) || printf ' %q' "$@"
  printf '\nstatus=$?\n'
  echo "echo; echo \"$end \$status ---\""
  echo 'exec /bin/busybox sleep 1000000'
} >"$work/initramfs/init"
chmod +x "$work/initramfs/init"
(cd "$work/initramfs" && find . | LD_LIBRARY_PATH=$libraries "$root/bin/cpio" -o -H newc -R 0:0 --quiet >"$work/iso/initrd")

cp "$root"/boot/vmlinuz-* "$work/iso/vmlinuz"
cp "$root/usr/lib/ISOLINUX/isolinux.bin" "$root/usr/lib/syslinux/modules/bios/ldlinux.c32" "$work/iso/"
# Kernel options that are needed, because Bochs 2.7 and Linux 6.1 disagree otherwise:
#   clearcpuid=xsavec,xsaves,pku  Bochs describes the compacted XSAVE area wrongly, upon which Linux disables XSAVE,
#                                 and with it AVX and AVX-512
#   clearcpuid=fsrm               Linux' memmove runs away where a processor has "fast short rep mov" but, as this one
#                                 says, no fast string operations
# Options that save emulated work: no self-tests of the crypto library (RSA takes a minute), no mitigations, no
# calibration of the delay loop and of the clock.
quiet='quiet loglevel=3'
((verbose == 0)) || quiet=
required='clearcpuid=xsavec,xsaves,pku,fsrm'
savings='cryptomgr.notests=1 mitigations=off tsc=reliable lpj=1000000'
cat >"$work/iso/isolinux.cfg" <<CONFIG
DEFAULT guest
LABEL guest
  KERNEL vmlinuz
  APPEND initrd=initrd console=ttyS0,115200 $quiet $required $savings panic=0
CONFIG
LD_LIBRARY_PATH=$libraries "$root/usr/bin/xorriso" -as mkisofs -quiet -o "$work/boot.iso" -b isolinux.bin -c boot.cat -no-emul-boot \
  -boot-load-size 4 -boot-info-table "$work/iso" >"$work/xorriso.log" 2>&1 || fail "$(cat "$work/xorriso.log")"

# corei7_icelake_u: AVX-512 F, BW, VL, DQ, CD, VNNI, VBMI. Emulated time is instructions / ips, so that a run does
# not depend on the load of the machine underneath.
cat >"$work/bochsrc" <<CONFIG
config_interface: textconfig
display_library: term
cpu: model=corei7_icelake_u, count=1, ips=100000000, reset_on_triple_fault=0, ignore_bad_msrs=1
memory: guest=1024, host=1024
romimage: file=$root/usr/share/bochs/BIOS-bochs-latest
vgaromimage: file=$root/usr/share/vgabios/vgabios.bin
pci: enabled=1, chipset=i440fx
ata0: enabled=1, ioaddr1=0x1f0, ioaddr2=0x3f0, irq=14
ata0-master: type=cdrom, path=$work/boot.iso, status=inserted
boot: cdrom
clock: sync=none, time0=utc
com1: enabled=1, mode=file, dev=$work/serial
sound: driver=dummy
log: $work/bochs.log
panic: action=fatal
error: action=ignore
info: action=ignore
debug: action=ignore
CONFIG

# Debian's Bochs has its debugger built in, which waits for a command first. bochs-term wants a terminal; script(1)
# gives it one and ends it when it is itself ended. setsid: one process group to end.
echo continue >"$work/debugger"
: >"$work/serial"
TERM=xterm LD_LIBRARY_PATH=$libraries LTDL_LIBRARY_PATH=$libraries/bochs/plugins BXSHARE=$root/usr/share/bochs \
  setsid nice -n 10 script -qfec "$root/usr/bin/bochs-bin -q -f $work/bochsrc -rc $work/debugger" /dev/null \
  </dev/null >"$work/screen" 2>&1 &
emulator=$!

started=$SECONDS
shown=0
show() { # prints what is new on the serial line, from the start marker (or all of it with -v)
  local text
  text=$(tr -d '\r\0' <"$work/serial" | sed -n "$( ((verbose)) && echo 'p' || echo "/^$begin/,/^$end/{/^--- castiron/!p}")")
  printf '%s' "${text:shown}"
  shown=${#text}
}
status=
while :; do
  show
  status=$(tr -d '\r\0' <"$work/serial" | sed -n "s/^$end \([0-9]*\) ---.*/\1/p" | tail -1)
  [[ -z $status ]] || break
  if ! kill -0 "$emulator" 2>/dev/null; then
    show
    echo "run_avx512: the emulator stopped before the program ended" >&2
    tail -20 "$work/bochs.log" "$work/serial" >&2
    exit 125
  fi
  if ((SECONDS - started > limit)); then
    echo "run_avx512: not done after $limit s" >&2
    tail -20 "$work/bochs.log" >&2
    exit 124
  fi
  sleep 1
done
show
echo
echo "run_avx512: $(basename "$program") ended with $status after $((SECONDS - started)) s" >&2
exit "$status"
