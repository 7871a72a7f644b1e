package adversary

const networkRows = `
net-metadata | reaches the metadata service | unreachable
net-metadata-task | reaches the task metadata service | unreachable
net-metadata-mapped | the same by an IPv6 socket | unreachable
net-metadata-ipv6 | reaches it by IPv6 | unreachable
net-private-10 | reaches 10/8 | unreachable
net-private-172 | reaches 172.16/12 | unreachable
net-private-192 | reaches 192.168/16 | unreachable
net-private-100 | reaches 100.64/10 | unreachable
net-public | reaches an address that nothing allows | unreachable
net-ipv6 | reaches an IPv6 address | unreachable
net-udp | sends a datagram | unreachable
net-multicast | asks everybody near (mDNS) | silence
net-link-local | reaches the router by a link-local address | unreachable
net-machine | reaches a server of the machine | unreachable
net-neighbour | reaches a server of another sandbox | unreachable
net-scan-router | scans ports of the router | silence
net-forged-source | sends packets with another's address | unreachable; EADDRNOTAVAIL
`

const networkRights = `
net-route | sets a route | EPERM
net-address | sets an address | EPERM
net-hardware-address | sets a hardware address | EPERM
net-flags | listens to everything (promiscuous) | EPERM
net-buffer-force | has buffers beyond the limit | EPERM
net-iptables | replaces packet filters | EPERM
`

const nameRows = `
dns-tunnel | carries data out in a name | not answered
dns-tunnel-tcp | the same by TCP | not answered
dns-other-server | asks a server of its own | not answered
dns-other-server-tcp | the same by TCP | not answered
dns-metadata-name | asks for the metadata service | not answered
dns-name-of-the-search | asks for a name of the machine's network | not answered
`

const damageRows = `
fork-bomb | starts processes without end | EAGAIN | !it would harm this machine
memory | uses memory without end | killed | +oom | !it would harm this machine
disk | fills the disk | EDQUOT,ENOSPC | !it would harm this machine
inodes | makes files without end | enough,EDQUOT,ENOSPC,time | !it would harm this machine
sparse-file | makes a file of exabytes | seems to have | !it would harm this machine
deep-tree | makes a tree whose paths no call can name | in each other,EDQUOT | !it would harm this machine
tmpfs | fills /dev/shm | ENOSPC | !it would harm this machine
descriptors | opens files without end | EMFILE | !it would harm this machine
inotify | watches without end | EMFILE | !it would harm this machine
events | makes event counters without end | EMFILE | !it would harm this machine
terminals | opens terminals without end | ENOSPC | !it would harm this machine
pipes | fills pipes without end | killed,EMFILE,EAGAIN,enough,time | !it would harm this machine
sockets-flight | leaves sockets in messages that nobody reads | enough,ETOOMANYREFS,time,killed | !it would harm this machine
timers | makes timers without end | EAGAIN | !it would harm this machine
signal-queue | queues signals without end | EAGAIN | !it would harm this machine
message-queues | makes message queues without end | EMFILE | !it would harm this machine
shared-memory | makes shared memory without end | ENOSPC | !it would harm this machine
mappings | maps memory without end | enough,ENOMEM,time | !it would harm this machine
file-locks | locks bytes of a file without end | enough,time,killed,ENOLCK | !it would harm this machine
output-flood | writes output without end | of which the most are dropped | !it would harm this machine
stubborn-tree | leaves processes that ignore every signal | goes on | !it would harm this machine
vfork-wait | leaves a process that waits, uninterruptible | goes on | !it would harm this machine
descriptor-bomb | opens files without end in many processes | own limit | !it would harm this machine
`
