"""The fold: one mapping of ranks for attention, another for the experts, over the same ranks (arXiv 2504.14960).

`degrees` computes the sizes of both views, `legality` checks them, `rank_groups` lists the ranks of each group and
`meshes` makes the process groups. All but `meshes` is arithmetic without torch.
"""
