#!/bin/sh
# SPDX-License-Identifier: MIT OR Apache-2.0
# The machine's first process: prepares the system for CRIU, runs the command, reports its exit status.
# Beside it: `settings` (what to share, how to load), `command`, softgpu.ko.

say() { echo "rewake: $*" > /dev/kmsg; }

finish() {
	echo "$1" > "$status_port"
	exec busybox poweroff -f
}

mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/pts /dev/shm
mount -t devpts -o gid=5,mode=620,ptmxmode=666 pts /dev/pts
mount -t tmpfs shm /dev/shm
mount -t tmpfs -o mode=1777 tmp /tmp
mount -t debugfs debug /sys/kernel/debug
mount -t cgroup2 cgroup /sys/fs/cgroup
ln -sf /proc/self/fd /dev/fd
ln -sf /proc/self/fd/0 /dev/stdin
ln -sf /proc/self/fd/1 /dev/stdout
ln -sf /proc/self/fd/2 /dev/stderr
hostname vm
# Room for pids that only servers of kept dumps have (tests/softgpu/src/kept.rs).
echo 4194304 > /proc/sys/kernel/pid_max
ip link set lo up
dmesg -n 7
# Modules that CRIU needs (without nf_tables it does not start on 6.12), then those that share the host's folders.
modprobe -a unix_diag inet_diag tcp_diag udp_diag netlink_diag af_packet_diag raw_diag tun veth nf_tables \
	virtio_console 9pnet_virtio 9p
status_port=/dev/$(basename "$(dirname "$(grep -lx status /sys/class/virtio-ports/*/name)")")

. /run/rewake/settings
for share in $shares; do
	tag=${share%%=*} path=${share#*=}
	mkdir -p "$path"
	mount -t 9p -o ro,trans=virtio,version=9p2000.L,cache=loose,msize=1048576 "$tag" "$path" || finish 125
done

for block in /sys/block/vd*; do
	[ "$(cat "$block/serial")" = scratch ] || continue
	mkdir -p /mnt/disk
	mount -t ext4 -o noatime "/dev/${block##*/}" /mnt/disk || finish 125
	# The rate that it was made with, in 10^6 bytes a second; empty if none.
	export DISK_MBPS="$disk_mbps"
done

modprobe -a $(modinfo -F depends "$SOFTGPU_KO" | tr , ' ')
if ! insmod "$SOFTGPU_KO" $module_arguments; then
	say "cannot load softgpu.ko with: $module_arguments"
	finish 125
fi

export HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8 SOFTGPU_KO REWAKE_PLUGIN
cd "$directory" || finish 125
say "ready"
if [ "$interactive" = yes ]; then
	setsid --ctty --wait sh /run/rewake/command < /dev/hvc0 > /dev/hvc0 2>&1
	status=$?
else
	# Not the terminal itself: to the command its output is a pipe, as it is below any other harness.
	exec 3<> /dev/hvc0
	stty -F /dev/hvc0 raw -echo
	mkfifo /run/rewake/output
	cat /run/rewake/output >&3 &
	output=$!
	setsid --wait sh /run/rewake/command < /dev/null > /run/rewake/output 2>&1 3>&-
	status=$?
fi

# Ends all processes that the command has left; then none may hold the GPUs.
for round in 1 2; do
	for process in /proc/[0-9]*; do
		process=${process#/proc/}
		[ "$process" = $$ ] || [ "$process" = "$output" ] || kill -9 "$process"
	done
done 2> /dev/null
wait
if [ -e /sys/module/softgpu ]; then
	# The driver cleans up processes in the background; a minute is enough.
	tries=300
	until rmmod softgpu 2> /dev/null || [ "$tries" = 0 ]; do
		tries=$((tries - 1))
		sleep 0.2
	done
	[ ! -e /sys/module/softgpu ] || say "leak: softgpu.ko is held though every process is gone"
fi
finish $status
