"""How the nodes of a step read as what a kernel computes, with the reason where they do not."""
