"""The fold: attention and experts mapped differently onto the same ranks.

degrees -> two views -> legality -> rank groups -> device meshes. All but `meshes` is plain arithmetic, without torch.
"""
