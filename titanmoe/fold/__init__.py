"""The fold: attention and experts laid differently over the same ranks.

degrees -> two views -> legality -> rank groups -> device meshes. All but `meshes` is plain arithmetic, without torch.
"""
