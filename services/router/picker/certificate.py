"""A certificate that this process makes for itself."""

from __future__ import annotations

import datetime

import grpc

VALID_FOR = datetime.timedelta(days=3650)
NAME = "tandem-endpoint-picker"
"""The certificate's."""


def self_signed_credentials() -> grpc.ServerCredentials:
    """TLS of a gRPC server, by a new key and a self-signed certificate."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, NAME)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # for clocks behind ours
        .not_valid_after(now + VALID_FOR)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return grpc.ssl_server_credentials([(pem, certificate.public_bytes(serialization.Encoding.PEM))])
