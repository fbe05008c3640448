"""A program on a GPU: each pass is one captured graph.

- `captured_program` captures by a `recorder` after a `rehearsal`, with the libraries' `handles`,
  and replays on `current_gpu`; `io_binding` patches the addresses of inputs and outputs, as
  `claims` allows.
- `program_pool` has the instances of a plan's program; `shipped` is one to try.
- `autograd` makes a pass a node of torch's; `own_leaves` and `vmaps` serve it.
"""
