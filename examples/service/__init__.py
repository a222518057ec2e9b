"""A sentence encoder as a service that its users may look into and steer: `make service`.

Every request brings its own captures, steering and counts, and they touch no other request,
though all of them share one MiniLM. `python -m examples.service --help` lists the options.
"""
