#!/bin/sh
# SPDX-License-Identifier: MIT OR Apache-2.0
# What mmdebstrap does not do by itself for the machine's system, whose folder is the argument.
set -e
system=$1

inside() {
	chroot "$system" env INITRD=No DEBIAN_FRONTEND=noninteractive LC_ALL=C "$@"
}

# Kernels with their headers; every series keeps its own names, so both fit into one system.
mkdir "$system/kernels"
for series in 6.12 7; do
	release=$(inside apt-cache show linux-image-amd64 |
		sed -n "s/^Depends:.* linux-image-\($series\.[^ ]*\) .*/\1/p" | tail -n 1)
	if [ -z "$release" ]; then
		echo "E: no kernel $series in these suites" >&2
		exit 1
	fi
	inside apt-get install --yes "linux-image-$release" "linux-headers-$release"
	ln -s "$release" "$system/kernels/$series"
done

# The older CRIU beside sid's: its program alone, with sid's libraries and the one that sid has in a newer version only. And the older libc for
# programs that it dumps: it does not know the guard pages that sid's has the kernel put under threads' stacks.
inside apt-get install --yes libnet1 patchelf
inside sh -ec '
	mkdir /tmp/old
	cd /tmp/old
	chown _apt .
	apt-get download criu/trixie libc6/trixie
	dpkg-deb -x criu_*.deb .
	mv usr/sbin/criu /usr/local/sbin/criu-4.1
	dpkg-deb -x libc6_*.deb libc
	mv libc/usr/lib/x86_64-linux-gnu /usr/local/lib/older
	cd /
	rm -r /tmp/old
	criu --version
	criu-4.1 --version'

# CRIU's own GPU plugin, in C, which Debian does not build: what ours is measured against.
sed -i "s/^Types: deb$/Types: deb deb-src/" "$system"/etc/apt/sources.list.d/*.sources
inside apt-get update
inside sh -ec '
	mkdir /tmp/source
	cd /tmp/source
	chown _apt .
	apt-get source --download-only --tar-only criu/sid
	tar -xf criu_*.orig.tar.*
	cd criu-*/
	make -j"$(nproc)" criu amdgpu_plugin
	mkdir -p /usr/local/lib/criu
	cp plugins/amdgpu/amdgpu_plugin.so /usr/local/lib/criu/
	cd /
	rm -r /tmp/source
	ldd /usr/local/lib/criu/amdgpu_plugin.so'
inside apt-get clean
rm -r "$system"/var/lib/apt/lists/*
