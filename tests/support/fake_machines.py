"""Machines that are described by files below a directory, as `Machine` reads them."""

from octavo.worker.machine import Machine


def draw(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Machine(root)


def two_sockets(root, affinity=range(16)):
    """Two nodes of four cores with two hardware threads each; cpu 7 and its sibling are offline."""
    files = {
        f"sys/devices/system/cpu/cpu{i}/topology/core_cpus_list": f"{i % 8},{i % 8 + 8}\n"
        for i in range(16)
    } | {
        "sys/devices/system/cpu/online": "0-6,8-14\n",
        "sys/devices/system/node/node0/cpulist": "0-3,8-11\n",
        "sys/devices/system/node/node0/meminfo": "Node 0 MemTotal:       1024 kB\n",
        "sys/devices/system/node/node1/cpulist": "4-7,12-15\n",
        "sys/devices/system/node/node1/meminfo": "Node 1 MemTotal:       2048 kB\n",
        "sys/devices/system/node/node2/cpulist": "\n",  # memory without CPUs
    }
    draw(root, files)
    return Machine(root, frozenset(affinity))
