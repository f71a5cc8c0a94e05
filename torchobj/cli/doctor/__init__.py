"""`torchobj doctor`: checks the machine and a store, and says what to change.

`command` is the command, and `check` what each check returns. `machine` sends no request; `s3_credentials` and
`gcs_credentials` find where the credentials of requests come from; `network` checks address, TLS, region and clock of a
store; `store` sends one request of each kind, and `writes` those that write.
"""
