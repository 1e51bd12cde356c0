"""Tokens to the experts' owners and back (paper, Section V): all-to-all in three forms, over ranks that tensor parallelism already uses.

    placement.py     which ranks own an expert, and which ranks PCC's groups are
    pairs.py         the rows that a rank sends, in order: for each (token, expert), a row for each slice of the expert
    peers.py         one group of ranks that swap rows (mpi_peers.py: host memory, nccl_peers.py: GPUs)
    hop.py           one all-to-all of rows with uneven counts, there and back
    forms.py         what the forms share: hops there, the same hops back, the weighted sum
    flat.py          one hop over all p ranks:                           p - 1 messages
    hierarchical.py  two hops, within a machine and across:              G - 1 + p/G - 1, and each row travels twice
    pcc.py           tokens are replicated over L tensor-parallel ranks:  p/L - 1, and L - 1 for what the way back gathers
    slots.py         the same with a slot a token: no counts, nothing for the host to wait for (decode steps in a graph)
    cost.py          what each form costs: messages, bytes, and seconds by an alpha-beta model
    draw.py          PCC's steps with the ranks that take them
"""
