#!/bin/sh
# SPDX-License-Identifier: MIT OR Apache-2.0
# What the demo's system, whose folder is the argument, needs beside the files of its packages: no script of a package
# has been run.
set -e
system=$1
release=$(ls "$system/usr/lib/modules")
modules=$system/usr/lib/modules/$release

case $release in
7.*) ;;
*)
	echo "E: no kernel 7 in this suite, but $release" >&2
	exit 1
	;;
esac
mkdir "$system/kernels"
ln -s "$release" "$system/kernels/7"
ln -s "../usr/lib/modules/$release/vmlinuz" "$system/boot/vmlinuz-$release"

ln -s mawk "$system/usr/bin/awk"
for name in passwd group; do
	cp "$system/usr/share/base-passwd/$name.master" "$system/etc/$name"
done

# Drivers of hardware that the machine does not have would be indexed and written to its disk.
cd "$modules/kernel"
rm -r sound
for file in drivers/* drivers/net/* drivers/gpu/drm/*; do
	case $file in
	drivers/block | drivers/char | drivers/gpu | drivers/net | drivers/virtio) ;;
	drivers/net/*.ko* | drivers/gpu/drm/*.ko*) ;;
	*) rm -r "$file" ;;
	esac
done
chroot "$system" depmod "$release"
