#include "c10d/reconfigurable_backend.h"

#include "c10d/shm_backend.h"
#include "c10d/shm_errors.h"
#include "c10d/shm_work.h"
#include "shm_ownership.h"

#include <algorithm>
#include <set>
#include <thread>
#include <utility>
#include <variant>

namespace fddp {

ReconfigurableBackend::ReconfigurableBackend(
    pybind11::object open, std::string handle, int rank, int size, std::chrono::milliseconds timeout)
    : Backend(rank, size),
      open_(std::move(open)),
      handle_(std::move(handle)),
      options_(c10::make_intrusive<Options>("fddp", timeout)) {
  init();
}

ReconfigurableBackend::~ReconfigurableBackend() {
  // gloo's destructor joins threads that release tensors, which may need the GIL.
  without_gil([this] { opened_.reset(); });
}

ReconfigurableBackend::BackendPtr ReconfigurableBackend::opened() const {
  const std::lock_guard lock(mutex_);
  return opened_;
}

ReconfigurableBackend::BackendPtr ReconfigurableBackend::forward() const {
  BackendPtr backend = opened();
  if (!backend) {
    throw_backend_error(
        "the group is not open: torch.distributed._reconfigure was not called since it was made or "
        "aborted, or has failed; call it with a new uuid");
  }
  return backend;
}

void ReconfigurableBackend::check_handles(const std::vector<std::string>& handles) const {
  TORCH_CHECK(!handles.empty(), "reconfigure needs at least one handle");
  std::set<std::string> seen;
  for (const std::string& handle : handles) {
    TORCH_CHECK(
        handle.rfind("fddp:", 0) == 0, "'", handle,
        "' is not a handle of the backend \"fddp\"; pass what _get_reconfigure_handle() returned");
    TORCH_CHECK(
        seen.insert(handle).second, "the handle '", handle, "' was passed twice; each rank has one");
  }
  TORCH_CHECK(
      seen.count(handle_) == 1, "none of the ", handles.size(), " handles is this rank's, '", handle_,
      "'; only ranks whose handle is passed call reconfigure");
}

void ReconfigurableBackend::reopen(
    int64_t uuid, const std::vector<std::string>& handles, std::chrono::milliseconds timeout) {
  check_handles(handles);
  end();  // first: a rank that waits for this one in an operation would not take part
  BackendPtr backend;
  {
    const PythonEntry python;
    const auto seconds = [](std::chrono::milliseconds duration) {
      return std::chrono::duration<double>(duration).count();
    };
    backend = open_.get()(uuid, handles, seconds(timeout), seconds(options_->timeout)).cast<BackendPtr>();
  }
  const std::lock_guard lock(mutex_);
#ifdef C10D_BACKEND_HAS_RECONFIGURE  // else they are constants
  rank_ = backend->getRank();
  size_ = backend->getSize();
#endif
  opened_ = std::move(backend);
}

#ifdef C10D_BACKEND_HAS_RECONFIGURE
ReconfigurableBackend::WorkPtr ReconfigurableBackend::reconfigure(
    const c10d::ReconfigureOptions& options) {
  std::vector<std::string> handles;
  std::visit(
      [&](const auto& given) { handles.assign(given.begin(), given.end()); }, options.handles);
  // All ranks must number a set alike.
  if (options.handles.index() == 0) std::sort(handles.begin(), handles.end());
  reopen(options.uuid, handles, options.timeout.value_or(options_->timeout));
  const WorkDescription description = {
      c10d::OpType::UNKNOWN, "fddp:reconfigure", rank_, 0, options_->timeout};
  const auto work =
      c10::make_intrusive<CollectiveWork>(nullptr, description, Tensors(), TensorLists());
  work->all_started();
  return work;
}
#endif

void ReconfigurableBackend::end() {
  BackendPtr ended;
  {
    const std::lock_guard lock(mutex_);
    ended = std::move(opened_);
  }
  if (!ended) return;
  ended->abort();
  if (dynamic_cast<ShmBackend*>(ended.get()) != nullptr) return;
  // gloo does not abort. Its destructor waits for pending operations, which end once the other ranks
  // have released theirs.
  std::thread([ended = std::move(ended)]() mutable { ended.reset(); }).detach();
}

void ReconfigurableBackend::setTimeout(std::chrono::milliseconds timeout) {
  options_->timeout = timeout;
  if (const BackendPtr backend = opened()) backend->setTimeout(timeout);
}

void ReconfigurableBackend::shutdown() {
  if (const BackendPtr backend = opened()) backend->shutdown();
}

bool ReconfigurableBackend::supportsTensorAlloc(c10::DeviceIndex device) {
  const BackendPtr backend = opened();
  return backend && backend->supportsTensorAlloc(device);
}

}  // namespace fddp
