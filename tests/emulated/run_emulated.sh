#!/usr/bin/env bash
# Runs a statically linked program in an emulated PC whose processor has AVX-512 and AMX, and returns its exit code.
#
#   run_emulated.sh [-t SECONDS] [-e NAME=VALUE]... [-v] PROGRAM [ARGUMENT]...
#
#   -t SECONDS     wall-clock limit (600); when it is over, the script ends with 124
#   -e NAME=VALUE  an environment variable for the program; may be repeated
#   -v             show the guest's boot messages too
#
# The machine is Bochs 3 (no hardware virtualisation needed) with a Debian kernel and an initramfs that holds the
# program. Everything comes from packages of Debian 13 (trixie), unpacked once, never installed, under
# $CASTIRON_EMULATOR_DIR (default ~/.cache/castiron/emulator). See README.md here.
set -euo pipefail

fail() {
  echo "run_emulated: $*" >&2
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
    *) fail "unknown option; usage: run_emulated.sh [-t SECONDS] [-e NAME=VALUE]... [-v] PROGRAM [ARGUMENT]..." ;;
  esac
done
shift $((OPTIND - 1))
(($# > 0)) || fail "no program given; usage: run_emulated.sh [-t SECONDS] [-e NAME=VALUE]... [-v] PROGRAM [ARGUMENT]..."
program=$1
shift
[[ -x $program ]] || fail "$program is not an executable file"
if readelf -lW "$program" | grep -q INTERP; then
  fail "$program is dynamically linked and the guest has no libraries; link it with -static"
fi

cache=${CASTIRON_EMULATOR_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/castiron/emulator}
root=$cache/trixie
packages=(bochs bochs-term bochsbios vgabios isolinux syslinux-common xorriso busybox-static util-linux
  linux-image-cloud-amd64/trixie-backports)

# Bochs 3.0 computes two of the instructions that our kernels use wrongly (so does 3.1): VCVTNE2PS2BF16 looks past the
# first operand for it and finds the second, and TDPBSSD multiplies bytes as if they had no sign. The bytes of its
# machine code that mend this: offset in the file, what is there, what belongs there. probe.c checks the outcome.
mended=usr/bin/bochs-bin
mended_sha256=07fc8c4bee6efb24d690302db0f07159ad5a153c88bca64bb9345a4263ceb5aa
mends=(
  # r15, from which the second half is read, lies r13 elements of four bytes before the first operand; what these
  # bytes did (rbx = the result) is done already. Then the comparison that r13 was for is made with its copy, r12.
  "0x2ce565 488d9c2490000000 49c1e5024d29ef90" # lea rbx,[rsp+0x90] -> shl r13,2; sub r15,r13; nop
  "0x2ce575 4539f5 4539f4"                     # cmp r13d,r14d -> cmp r12d,r14d
  # movzx and shr of the four bytes of either operand -> movsx and sar
  "0x2743be 440fb6c2 440fbec2" "0x2743c2 0fb6c6 0fbec6" "0x2743c5 440fb6d1 440fbed1" "0x2743c9 0fb6ed 0fbeed"
  "0x2743d3 c1e918 c1f918" "0x2743dd 450fb6d2 450fbed2" "0x2743e7 c1ea18 c1fa18" "0x2743f1 450fb6c0 450fbec0"
)
mend() { # FILE
  [[ $(sha256sum <"$1") == "$mended_sha256  -" ]] || fail "$mended is not that of Debian's bochs 3.0+dfsg-1, whose \
instructions this script mends; see whether they are right in the new one (probe.c) and adapt or drop the list of mends"
  local change offset before after
  for change in "${mends[@]}"; do
    read -r offset before after <<<"$change"
    [[ $(od -An -v -tx1 -j "$offset" -N $((${#before} / 2)) "$1" | tr -d ' \n') == "$before" ]] ||
      fail "$mended has no $before at $offset"
    printf "$(sed 's/../\\x&/g' <<<"$after")" | dd of="$1" bs=1 seek=$((offset)) conv=notrunc status=none
  done
}

# Downloads and unpacks the packages and all that they need (100 MB), down to the C library: for apt, with a state and
# sources of its own, nothing is installed yet. What apt knows of this system is neither used nor changed.
fetch() {
  echo "run_emulated: unpacking the emulator into $cache (once)" >&2
  local apt=$cache/apt keys=/usr/share/keyrings/debian-archive-keyring.gpg
  command -v apt-get >/dev/null || fail "there is no apt-get, which downloads the emulator; use Debian or a relative"
  [[ -e $keys ]] || fail "there is no $keys to verify Debian's packages with; install debian-archive-keyring"
  rm -rf "$apt" "$root" "$root.part"
  mkdir -p "$apt/lists/partial" "$apt/archives/partial" "$root.part"
  : >"$apt/status"
  printf 'deb [signed-by=%s] https://deb.debian.org/debian %s main\n' "$keys" trixie "$keys" trixie-backports \
    >"$apt/sources.list"
  local options=(-qq -o Debug::NoLocking=1 -o APT::Architecture=amd64 -o APT::Sandbox::User=
    -o Dir::State="$apt" -o Dir::State::lists="$apt/lists" -o Dir::State::status="$apt/status" -o Dir::Cache="$apt"
    -o Dir::Etc::sourcelist="$apt/sources.list" -o Dir::Etc::sourceparts=-)
  apt-get "${options[@]}" -o APT::Update::Error-Mode=any update >&2 || fail "Debian's list of packages was not fetched"
  apt-get "${options[@]}" install -y --no-install-recommends --download-only "${packages[@]}" >&2 ||
    fail "the packages were not downloaded"
  local deb
  for deb in "$apt"/archives/*.deb; do
    dpkg-deb -x "$deb" "$root.part"
  done
  rm -rf "$apt"
  mend "$root.part/$mended"
  mv "$root.part" "$root"
}
[[ -d $root ]] || fetch

# The emulator is newer than most systems: it runs over the C library that was unpacked with it.
libraries=$root/usr/lib/x86_64-linux-gnu
loader=("$libraries/ld-linux-x86-64.so.2" --library-path "$libraries")

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
cp "$root/usr/bin/busybox" "$root/usr/bin/chrt" "${loader[0]}" "$libraries/libc.so.6" "$work/initramfs/bin/"
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
  # First in, first out, with no time set aside for others: a thread runs until it waits (see setcpuid below).
  echo 'echo -1 >/proc/sys/kernel/sched_rt_runtime_us'
  printf '/bin/ld-linux-x86-64.so.2 --library-path /bin /bin/chrt -f 1 /bin/program'
  (($# == 0)) || printf ' %q' "$@"
  printf '\nstatus=$?\n'
  echo "echo; echo \"$end \$status ---\""
  echo 'exec /bin/busybox sleep 1000000'
} >"$work/initramfs/init"
chmod +x "$work/initramfs/init"
(cd "$work/initramfs" && find . | "$root/usr/bin/busybox" cpio -o -H newc -R 0:0 >"$work/iso/initrd" 2>"$work/cpio.log") ||
  fail "$(cat "$work/cpio.log")"

cp "$root"/usr/lib/modules/*/vmlinuz "$work/iso/vmlinuz"
cp "$root/usr/lib/ISOLINUX/isolinux.bin" "$root/usr/lib/syslinux/modules/bios/ldlinux.c32" "$work/iso/"
# setcpuid=324 (XFD): Linux enables the tiles of AMX only where the processor has "extended feature disable", by which a
# thread's first use of a tile is trapped and memory to save its tiles is added. Bochs lacks it. Told that it is there,
# Linux enables the tiles, allows them on request (arch_prctl) and writes registers for the trap, which Bochs ignores.
# No trap, no memory: tiles are never saved, and threads must not preempt each other (see chrt above). setcpuid= is in
# Linux since 6.15, hence the kernel from backports.
# Options that save emulated work: no self-tests of the crypto library (RSA takes a minute), no mitigations, no
# calibration of the delay loop and of the clock.
quiet='quiet loglevel=3'
((verbose == 0)) || quiet=
required='setcpuid=324'
savings='cryptomgr.notests=1 mitigations=off tsc=reliable lpj=1000000'
cat >"$work/iso/isolinux.cfg" <<CONFIG
DEFAULT guest
LABEL guest
  KERNEL vmlinuz
  APPEND initrd=initrd console=ttyS0,115200 $quiet $required $savings panic=0
CONFIG
"${loader[@]}" "$root/usr/bin/xorriso" -as mkisofs -quiet -o "$work/boot.iso" -b isolinux.bin -c boot.cat \
  -no-emul-boot -boot-load-size 4 -boot-info-table "$work/iso" >"$work/xorriso.log" 2>&1 ||
  fail "$(cat "$work/xorriso.log")"

# sapphire_rapids: AVX-512 F, BW, VL, DQ, CD, VBMI, VNNI, BF16, FP16; AMX TILE, INT8, BF16. Emulated time is
# instructions / ips, so that a run does not depend on the load of the machine underneath. la57: Bochs leaves system
# management mode, which its BIOS uses, with a panic where page tables have five levels.
cat >"$work/bochsrc" <<CONFIG
config_interface: textconfig
display_library: term
cpu: model=sapphire_rapids, exclude_features="la57", count=1, ips=100000000, reset_on_triple_fault=0, ignore_bad_msrs=1
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

# bochs-term wants a terminal; script(1) gives it one and ends it when it is itself ended. setsid: one process group
# to end.
: >"$work/serial"
TERM=xterm LTDL_LIBRARY_PATH=$libraries/bochs/plugins BXSHARE=$root/usr/share/bochs \
  setsid nice -n 10 script -qfec "${loader[*]@Q} $root/usr/bin/bochs-bin -q -f $work/bochsrc" /dev/null \
  </dev/null >"$work/screen" 2>&1 &
emulator=$!

# Bochs draws on a terminal of its own and names it. Somebody has to read there, or it waits when that is full; not
# before the program starts, because what is read is echoed and then types into the boot loader.
reader=
read_screen() {
  [[ -z $reader ]] && grep -q -- "^$begin" "$work/serial" || return 0
  local screen
  screen=$(sed -n 's/^Bochs connected to screen "\(.*\)".*/\1/p' "$work/screen" | tr -d '\r')
  [[ -c $screen ]] || fail "Bochs named no screen: $(cat "$work/screen")"
  cat "$screen" >/dev/null 2>&1 & # ends with Bochs
  reader=$!
}

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
  read_screen
  show
  status=$(tr -d '\r\0' <"$work/serial" | sed -n "s/^$end \([0-9]*\) ---.*/\1/p" | tail -1)
  [[ -z $status ]] || break
  if ! kill -0 "$emulator" 2>/dev/null; then
    show
    echo "run_emulated: the emulator stopped before the program ended" >&2
    tail -n 20 "$work/bochs.log" "$work/serial" >&2
    exit 125
  fi
  if ((SECONDS - started > limit)); then
    echo "run_emulated: not done after $limit s" >&2
    tail -n 20 "$work/bochs.log" >&2
    exit 124
  fi
  sleep 1
done
show
echo
echo "run_emulated: $(basename "$program") ended with $status after $((SECONDS - started)) s" >&2
exit "$status"
