"""llama.cpp as an HTTP server, through the package xllamacpp: MODEL PORT SLOTS CONTEXT, the context
of one slot in tokens. Serves until it is ended.
"""

import os
import sys
import threading

import xllamacpp

model, port, slots, context = sys.argv[1], *map(int, sys.argv[2:5])
params = xllamacpp.CommonParams()
params.model.path = model
params.hostnames = ["127.0.0.1"]
params.port = port
params.n_parallel = slots
params.n_ctx = slots * context
params.use_jinja = True
params.cache_ram_mib = 0
params.cpuparams.n_threads = os.cpu_count() or 1
server = xllamacpp.Server(params)
threading.Event().wait()
