"""The version of the session protocol that this build speaks; router and worker must have the same."""

PROTOCOL_VERSION = 1
