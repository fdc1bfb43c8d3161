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


def many_cores(root, num_cores, cores_per_cache, offline=None):
    """Two nodes; cpu i and cpu i + num_cores are one core. 0 cores per cache: no third level."""
    files = {}
    for i in range(2 * num_cores):
        core = i % num_cores
        cpu = f"sys/devices/system/cpu/cpu{i}"
        files[f"{cpu}/topology/core_cpus_list"] = f"{core},{core + num_cores}"
        if cores_per_cache:
            first = core - core % cores_per_cache
            last = first + cores_per_cache - 1
            shared = f"{first}-{last},{first + num_cores}-{last + num_cores}"
            files[f"{cpu}/cache/index3/shared_cpu_list"] = shared
    half = num_cores // 2
    for node in range(2):
        first, last = node * half, (node + 1) * half - 1
        cpus = f"{first}-{last},{first + num_cores}-{last + num_cores}"
        files[f"sys/devices/system/node/node{node}/cpulist"] = cpus
    online = [i for i in range(2 * num_cores) if i % num_cores != offline]
    files["sys/devices/system/cpu/online"] = ",".join(map(str, online))
    draw(root, files)
    return Machine(root, frozenset(range(2 * num_cores)))
