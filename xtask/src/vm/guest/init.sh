#!/bin/busybox sh
# SPDX-License-Identifier: MIT OR Apache-2.0
# The initramfs's only program: finds the disk, and executes boot.sh there.
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t devtmpfs dev /dev
read -r words < /proc/cmdline
case " $words " in *" rewake.probe "*) exec /bin/busybox poweroff -f ;; esac
while read -r module; do
	/bin/busybox insmod "/modules/$module"
done < /modules/order
if ! /bin/busybox mount -t ext4 /dev/vda /disk; then
	echo "rewake: cannot mount the disk" > /dev/kmsg
	exec /bin/busybox poweroff -f
fi
/bin/busybox mount -t tmpfs -o mode=755 run /disk/run
/bin/busybox cp -a /rewake /disk/run/rewake
/bin/busybox umount /proc /dev
exec /bin/busybox switch_root /disk /bin/sh /run/rewake/boot.sh
