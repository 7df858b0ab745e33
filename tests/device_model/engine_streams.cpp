// Answers what torch's C++ code asks a GPU for: current streams, new streams, events and waits of the device model.
//
// A CPU build of torch has neither a device guard nor hooks for CUDA, so that its autograd engine refuses tensors of a
// GPU. This file registers both. The current stream is a number per thread, as in CUDA. Events and waits are passed on
// to the callbacks of device.py. It must be loaded before torch is imported, because torch asks for the hooks once.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>

namespace {

struct Callbacks {
  int64_t (*record)(int64_t event, int64_t stream);  // returns the event's number; event 0 gets a new one
  void (*block)(int64_t event, int64_t stream);
  void (*query)(int64_t event);  // 0 for a stream
  void (*synchronize_event)(int64_t event);
  void (*synchronize_stream)(int64_t stream);
  void (*synchronize_device)();
  void (*use)(const void* data, int64_t stream);
};

Callbacks callbacks{};
thread_local int64_t current_stream = 0;
std::atomic<int64_t> last_stream{0};

constexpr c10::DeviceType kType = c10::DeviceType::CUDA;
const c10::Device kDevice(kType, 0);

c10::Stream stream_of(int64_t number) {
  return c10::Stream(c10::Stream::UNSAFE, kDevice, number);
}

int64_t number_of(void* event) {
  return reinterpret_cast<int64_t>(event);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const override { return stream_of(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream_of(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream_of(++last_stream); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream_of(++last_stream); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const int64_t before = current_stream;
    current_stream = stream.id();
    return stream_of(before);
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    *event = reinterpret_cast<void*>(callbacks.record(number_of(*event), stream.id()));
  }
  void block(void* event, const c10::Stream& stream) const override {
    callbacks.block(number_of(event), stream.id());
  }
  bool queryEvent(void* event) const override {
    callbacks.query(number_of(event));
    return true;
  }
  bool queryStream(const c10::Stream&) const override {
    callbacks.query(0);
    return true;
  }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 1.0; }
  void synchronizeEvent(void* event) const override { callbacks.synchronize_event(number_of(event)); }
  void synchronizeStream(const c10::Stream& stream) const override { callbacks.synchronize_stream(stream.id()); }
  void synchronizeDevice(const c10::DeviceIndex) const override { callbacks.synchronize_device(); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    callbacks.use(data.get(), stream.id());
  }
};

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
};

}  // namespace

C10_REGISTER_GUARD_IMPL(CUDA, Guard);

namespace at {
using ModelHooks = Hooks;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, ModelHooks);
}  // namespace at

extern "C" {
void set_callbacks(Callbacks given) { callbacks = given; }
int64_t get_current_stream() { return current_stream; }
void set_current_stream(int64_t stream) { current_stream = stream; }
}
