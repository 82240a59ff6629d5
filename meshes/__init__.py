"""The ground floor: mesh axes, sharding rules, device meshes and hand-written collectives."""
