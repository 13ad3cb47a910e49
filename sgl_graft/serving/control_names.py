"""How a control message is known to be ours, in both processes."""

PREFIX = "sgl_graft/"  # of the name of a ``DumperControlReqInput``
