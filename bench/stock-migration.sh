#!/bin/bash
# SPDX-License-Identifier: MIT OR Apache-2.0
# How long stock CRIU keeps a program from running when it moves by post-copy on one machine, over loopback:
#   frozen   criu dump --lazy-pages, from the moment before the stop until its page server listens
#   restore  criu lazy-pages and criu restore --lazy-pages, from their start until the tasks run
# Programs: the tests' target with a region of MIB MiB; 1 stands for an empty one. Needs root, CRIU in the
# environment (or criu on the path), and the tests' target program:
#   cargo build -p rewake-tests && bench/stock-migration.sh [MIB...]
set -euo pipefail
criu=${CRIU:-criu}
target=$(dirname "$0")/../target/debug/target
rounds=5
port=7761
# CRIU's page server fails with smaller pipes where it lacks CAP_SYS_RESOURCE.
pipes=/proc/sys/fs/pipe-max-size
before=$(cat $pipes)
trap 'echo "$before" > $pipes' EXIT
echo 4194304 > $pipes

now() { date +%s%N; }

round() {
    local mib=$1 work pid
    work=$(mktemp -d /tmp/stock-migration.XXXXXX)
    mkdir "$work/img" "$work/files"
    printf '#!/bin/sh\necho "$CRTOOLS_SCRIPT_ACTION $(date +%%s%%N)" >> %s/moments\n' "$work" > "$work/script"
    chmod 755 "$work/script"
    setsid "$target" plain --dir "$work/files" --mib "$mib" < /dev/null > /dev/null 2>&1 3>&- &
    pid=$!
    until [ -e "$work/files/ready" ]; do sleep 0.05; done
    "$criu" dump -t "$pid" -D "$work/img" -o dump.log --lazy-pages --address 127.0.0.1 --port $port \
        --action-script "$work/script" &
    until grep -qs '^status-ready' "$work/moments"; do sleep 0.002; done
    local started
    started=$(now)
    "$criu" lazy-pages -D "$work/img" -W "$work" -o lazy.log --page-server --address 127.0.0.1 --port $port &
    local lazy=$!
    until [ -S "$work/lazy-pages.socket" ]; do sleep 0.001; done
    # The source still has the pid, so the restored program gets a pid namespace of its own.
    unshare --pid --mount-proc --fork --kill-child sh -c '"$@"; sleep 600' sh "$criu" restore -D "$work/img" \
        -W "$work" -o restore.log --lazy-pages -d --action-script "$work/script" &
    local host=$!
    until grep -qs '^post-resume' "$work/moments"; do sleep 0.002; done
    wait $lazy
    awk -v started="$started" '{ at[$1] = $2 } END {
        printf "%.1f %.1f\n", (at["status-ready"] - at["pre-dump"]) / 1e6, (at["post-resume"] - started) / 1e6
    }' "$work/moments"
    kill -KILL "$host"
    rm -rf "$work"
}

median() { sort -n | awk '{ v[NR] = $1 } END { print v[int((NR + 1) / 2)] }'; }

for mib in "${@:-1 1024}"; do
    for size in $mib; do
        results=$(for _ in $(seq $rounds); do round "$size" 2> /dev/null | tail -1; done)
        frozen=$(cut -d' ' -f1 <<< "$results" | median)
        restore=$(cut -d' ' -f2 <<< "$results" | median)
        echo "$size MiB: frozen $frozen ms, restore $restore ms (medians of $rounds)"
    done
done
