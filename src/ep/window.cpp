#include "ep/window.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "tidegate/ep.h"

namespace tidegate::ep {
namespace {

[[noreturn]] void fail(const std::string& what) {
  throw Failure("ep_buffer: " + what + ": " + std::strerror(errno));  // NOLINT: messages only
}

struct Knock {
  std::uint64_t secret;
  std::int64_t rank;
};

// The abstract namespace: such a name goes away with its socket.
socklen_t abstract_address(const std::string& name, sockaddr_un& address) {
  address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

bool readable(int fd, int milliseconds) {
  pollfd p{fd, POLLIN, 0};
  return poll(&p, 1, milliseconds) > 0;
}

}  // namespace

Fd::~Fd() {
  if (fd_ >= 0) {
    close(fd_);
  }
}

Mapping::Mapping(int fd, std::size_t bytes) : bytes_(bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (p == MAP_FAILED) {
    fail("cannot map a window of " + std::to_string(bytes) + " bytes");
  }
  data_ = static_cast<char*>(p);
}

Mapping::~Mapping() {
  if (data_ != nullptr) {
    munmap(data_, bytes_);
  }
}

Fd make_window(std::size_t bytes) {
  Fd fd(memfd_create("tidegate-ep", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.valid() || ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0 ||
      fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    fail("cannot make a window of " + std::to_string(bytes) + " bytes");
  }
  return fd;
}

Doorway::Doorway() : listener_(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
  std::uint64_t number = 0;
  if (!listener_.valid() || getrandom(&number, sizeof number, 0) != sizeof number ||
      getrandom(&secret_, sizeof secret_, 0) != sizeof secret_) {
    fail("cannot make a local socket");
  }
  name_ = "tidegate-ep-" + std::to_string(getpid()) + "-" + std::to_string(number);
  sockaddr_un address;
  const socklen_t length = abstract_address(name_, address);
  if (bind(listener_.get(), reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      listen(listener_.get(), SOMAXCONN) != 0) {
    fail("cannot listen on a local socket");
  }
}

int Doorway::serve(int window, int wait_milliseconds) {
  if (!readable(listener_.get(), wait_milliseconds)) {
    return -1;
  }
  const Fd visitor(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
  if (!visitor.valid()) {
    return -1;
  }
  ucred peer{};
  socklen_t length = sizeof peer;
  Knock knock{};
  if (getsockopt(visitor.get(), SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0 || peer.uid != geteuid() ||
      !readable(visitor.get(), wait_milliseconds) ||
      recv(visitor.get(), &knock, sizeof knock, MSG_WAITALL) != sizeof knock || knock.secret != secret_) {
    return -1;
  }
  char byte = 1;
  iovec data{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  cmsghdr* c = CMSG_FIRSTHDR(&message);
  c->cmsg_level = SOL_SOCKET;
  c->cmsg_type = SCM_RIGHTS;
  c->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(c), &window, sizeof window);
  return sendmsg(visitor.get(), &message, MSG_NOSIGNAL) == 1 ? static_cast<int>(knock.rank) : -1;
}

Visit::Visit(const std::string& name, std::uint64_t secret, int my_rank)
    : socket_(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
  sockaddr_un address;
  const socklen_t length = abstract_address(name, address);
  const Knock knock{secret, my_rank};
  if (!socket_.valid() || ::connect(socket_.get(), reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      send(socket_.get(), &knock, sizeof knock, MSG_NOSIGNAL) != sizeof knock) {
    fail("cannot reach the local socket of another rank");
  }
}

Fd Visit::receive(int wait_milliseconds) {
  if (!readable(socket_.get(), wait_milliseconds)) {
    return {};
  }
  char byte = 0;
  iovec data{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  if (recvmsg(socket_.get(), &message, MSG_CMSG_CLOEXEC) != 1) {
    fail("another rank closed its local socket");
  }
  const cmsghdr* c = CMSG_FIRSTHDR(&message);
  int fd = -1;
  if (c != nullptr && c->cmsg_type == SCM_RIGHTS) {
    std::memcpy(&fd, CMSG_DATA(c), sizeof fd);
  }
  return Fd(fd);
}

Fd Visit::life() const {
  ucred peer{};
  socklen_t length = sizeof peer;
  if (getsockopt(socket_.get(), SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0 || peer.pid <= 0) {
    return {};  // another pid namespace: deadlines remain
  }
  return Fd(static_cast<int>(syscall(SYS_pidfd_open, peer.pid, 0)));
}

bool is_gone(const Fd& life) { return life.valid() && readable(life.get(), 0); }

}  // namespace tidegate::ep
